"""Programs that open a package in its own runtime and answer questions; each runs in a process of its own.

None of them imports PlanForge, so that any Python or Node with the runtime can run them.
"""
