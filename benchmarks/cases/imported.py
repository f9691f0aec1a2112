"""Models that optimum exported, run by its own classes and imported: random weights, 64 new tokens."""

from __future__ import annotations

from pathlib import Path

from ..case import Case, Entry, Target, Work
from ..texts import llama_prompts, t5_sources

TOKENS = 32
NEW = 64


def imported_case(name: str, title: str, checkpoint: str, work: Work) -> Case:
    limited = {"torch_threads": 1}  # its search is torch's, whose threads and ONNX Runtime's may collide
    entries = {
        "planforge": Entry("planforge", "fp32", checkpoint, work, graphs="optimum_onnx"),
        "optimum": Entry("optimum_onnx", "fp32", checkpoint, work),
        "optimum, 1 thread": Entry(
            "optimum_onnx", "fp32", checkpoint, work, settings=limited, label="torch on 1 thread"
        ),
    }
    targets = (Target("planforge", "optimum", "per_s", 1.5),)
    return Case(name, "imported", title, entries, targets=targets)


def int8_case(name: str, title: str, checkpoint: str, work: Work) -> Case:
    """Return the case of int8 against fp32, verified at export, so that the logits have one peak."""
    entries = {
        "planforge int8": Entry("planforge", "int8", checkpoint, work, graphs="optimum_onnx"),
        "optimum": Entry("optimum_onnx", "fp32", checkpoint, work),
    }
    return Case(
        name,
        "imported",
        title,
        entries,
        varies={"precision": "int8 is compared with fp32, which is what optimum's classes run as exported"},
        targets=(Target("planforge int8", "optimum", "per_s", 1.5),),
    )


def cases(work: Path) -> list[Case]:
    prompt = llama_prompts(TOKENS)
    source = t5_sources(TOKENS)
    generation = Work("generate", *prompt, NEW)
    translation = Work("translate", *source, NEW)
    return [
        imported_case(
            "imported-llama",
            "Llama 110M, fp32, imported, batch 1: new tokens/s",
            "llama-110m",
            generation,
        ),
        int8_case(
            "imported-llama-int8",
            "Llama 110M with peaked logits, imported, batch 1: new tokens/s",
            "llama-110m-peaked",
            generation,
        ),
        imported_case(
            "imported-t5",
            "T5-small shape, fp32, imported, one source, greedy: new tokens/s",
            "t5-small",
            translation,
        ),
        int8_case(
            "imported-t5-int8",
            "T5-small shape with peaked logits, imported, one source, greedy: new tokens/s",
            "t5-small-peaked",
            translation,
        ),
        imported_case(
            "imported-t5-beams",
            "T5-small shape, fp32, imported, one source, 4 beams: new tokens/s",
            "t5-small",
            Work("translate", *source, NEW, beams=4),
        ),
    ]
