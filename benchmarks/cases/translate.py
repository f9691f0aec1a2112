"""Translation by a MarianMT shape (512 wide, 6 + 6 layers, vocabulary 58,101): 24 source, 32 new tokens."""

from __future__ import annotations

from pathlib import Path

from ..case import Case, Entry, Target, Work
from ..texts import marian_sources

SOURCE = 24
NEW = 32
INT8_DIFFERS = {"precision": "int8 is compared with fp32"}


def translation(name: str, title: str, rows: int, beams: int, ratio: float) -> Case:
    texts, prompts = marian_sources(rows, SOURCE)
    work = Work("translate", texts, prompts, NEW, beams)
    entries = {
        "planforge": Entry("planforge", "fp32", "marian", work),
        "planforge int8": Entry("planforge", "int8", "marian", work),
        "optimum": Entry("optimum_onnx", "fp32", "marian", work),
        # Its search is torch's, whose threads and ONNX Runtime's may be in each other's way.
        "optimum, 1 thread": Entry(
            "optimum_onnx", "fp32", "marian", work, settings={"torch_threads": 1}, label="torch on 1 thread"
        ),
        "transformers": Entry("transformers", "fp32", "marian", work),
    }
    targets = (
        Target("planforge", "optimum", "per_s", ratio),
        Target("planforge int8", "planforge", "per_s", 1.5),
    )
    return Case(name, "translate", title, entries, varies=INT8_DIFFERS, targets=targets)


def cases(work: Path) -> list[Case]:
    return [
        translation("translate-b1", "MarianMT shape, one source, greedy: new tokens/s", 1, 1, 2.5),
        translation("translate-b8", "MarianMT shape, 8 sources, 4 beams: new tokens/s", 8, 4, 3.0),
    ]
