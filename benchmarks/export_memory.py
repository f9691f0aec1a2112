"""The peak memory of `planforge export`, of all its processes together (Linux).

python -m benchmarks.export_memory CHECKPOINT BUNDLE [options of planforge export]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from .common import measure_command_cost

if __name__ == "__main__":
    checkpoint = Path(sys.argv[1])
    planforge = Path(sys.executable).with_name("planforge")
    command: list[str | Path] = [planforge, "export", checkpoint, "-o", sys.argv[2], "--force", *sys.argv[3:]]
    weights = sum(path.stat().st_size for path in checkpoint.rglob("*.safetensors"))
    print(json.dumps({"checkpoint_mb": round(weights / 1e6), **measure_command_cost(command)}, indent=2))
