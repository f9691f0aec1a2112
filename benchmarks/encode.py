"""Encoders alone: python -m benchmarks.encode, with the options of python -m benchmarks."""

from __future__ import annotations

import sys

from .__main__ import main

if __name__ == "__main__":
    main(["--cases", "encode", *sys.argv[1:]])
