"""The benchmarks of PlanForge against its peers, run by hand; results/ holds the measurements."""
