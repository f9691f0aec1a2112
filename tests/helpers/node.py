"""transformers.js, which `make` installs for the tests."""

from __future__ import annotations

from pathlib import Path

NODE_FOLDER = Path(__file__).parents[2] / "build/transformers-js"  # its node_modules has it
