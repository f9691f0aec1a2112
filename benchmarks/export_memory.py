"""The peak memory of `planforge export`, of all its processes together (Linux).

python -m benchmarks.export_memory CHECKPOINT BUNDLE [options of planforge export]

Writes results/export_memory.json.
"""

from __future__ import annotations

import sys
from pathlib import Path

from .common import measure_command_cost, write_result

if __name__ == "__main__":
    checkpoint = Path(sys.argv[1])
    planforge = Path(sys.executable).with_name("planforge")
    command: list[str | Path] = [planforge, "export", checkpoint, "-o", sys.argv[2], "--force", *sys.argv[3:]]
    weights = sum(path.stat().st_size for path in checkpoint.rglob("*.safetensors"))
    cost = measure_command_cost(command)
    ratio = round(cost["peak_rss_mb"] * 1e6 / weights, 2)
    facts = {"checkpoint_mb": round(weights / 1e6), "options": sys.argv[3:], "times_checkpoint": ratio}
    write_result("export_memory", {**facts, **cost})
