"""PlanForge beside its peers, run by hand; results/ holds what was measured."""
