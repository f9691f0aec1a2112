"""Checks that an export still computes the model."""
