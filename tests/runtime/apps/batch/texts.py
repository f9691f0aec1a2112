"""Texts for jobs."""

TEXTS = [f"wings lift the plane {number} times" for number in range(60)]
