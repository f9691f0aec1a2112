"""Compares an engine with PyTorch's answers, which a bundle keeps from its export, without PyTorch."""
