"""The models for programs with an event loop: their methods are awaited."""
