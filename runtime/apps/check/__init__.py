"""PyTorch's answers, kept in a bundle at export, and how an engine is compared with them; without PyTorch."""
