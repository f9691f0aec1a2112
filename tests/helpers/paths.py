"""Where the repository and its demos lie."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DEMOS = ROOT / "models" / "demos"
NODE_FOLDER = ROOT / "build/transformers-js"  # `make` installs transformers.js there for the tests
