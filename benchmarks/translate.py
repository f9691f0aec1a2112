"""Translation alone: python -m benchmarks.translate, with the options of python -m benchmarks."""

from __future__ import annotations

import sys

from .__main__ import main

if __name__ == "__main__":
    main(["--cases", "translate", *sys.argv[1:]])
