"""Models of the Llama family, exported natively: random weights of Qwen2.5 0.5B's and Llama 3.2 1B's shapes.

Greedy, from prompts of 32 tokens, but for the cases of long prompts. The tokens of every system are those of
transformers in fp32 before anything is timed. The weights of fp32 cases answer with another token at each
step, so that any fault shows; those of fewer bits are "sure" ones, see `checkpoints.copy_earlier_token`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..case import Case, Entry, Target, Work
from ..texts import llama_prompts
from .decode import ahead

SIZES = {"0.5b": ("qwen2.5-0.5b", "Qwen2.5 0.5B's shape"), "1b": ("llama-3.2-1b", "Llama 3.2 1B's shape")}
Systems = Mapping[str, tuple[str, str]]
FP32: Systems = {
    "planforge": ("planforge", "fp32"),
    "genai": ("onnxruntime_genai", "fp32"),
    "llama.cpp": ("llama_cpp", "fp32"),
}
BITS_16: Systems = {
    "planforge": ("planforge", "fp32"),
    "f16": ("llama_cpp", "f16"),
    "bf16": ("llama_cpp", "bf16"),
}
BITS_8: Systems = {
    "planforge": ("planforge", "int8"),
    "genai": ("onnxruntime_genai", "int8"),
    "llama.cpp": ("llama_cpp", "q8_0"),
}
BITS_4: Systems = {
    "planforge": ("planforge", "int4"),
    "genai": ("onnxruntime_genai", "int4"),
    "llama.cpp": ("llama_cpp", "q4_0"),
}
FP32_BESIDE_16 = {
    "precision": "fp32 is compared with llama.cpp's 16 bits, to which the checkpoint is rounded"
}
NEW = 64
PROMPT = 512
NEAR = 100
FAR = 4000
WINDOW = 512
STEPS = 64


def generation(rows: int, tokens: int, new_tokens: int) -> Work:
    """Return the work of random words in, greedy tokens out."""
    texts, prompts = llama_prompts(tokens, rows)
    return Work("generate", texts, prompts, new_tokens)


def case(name: str, what: str, systems: Systems, work: Work, sure: bool = True, **options: Any) -> Case:
    """Return a case of the size that its name begins with.

    Args:
        name: behind the group's.
        what: of the title, behind the model.
        systems: each entry's, with its name of the precision.
        work: of every entry.
        sure: whether the weights are sure ones.
        options: of `Case`.
    """
    checkpoint, shape = SIZES[name.partition("-")[0]]
    checkpoint += "-sure" if sure else ""
    entries = {entry: Entry(*system, checkpoint, work) for entry, system in systems.items()}
    return Case(f"llama-{name}", "llama", f"{shape}, {what}", entries, reference="transformers", **options)


def decode_cases(size: str) -> list[Case]:
    """Return the cases of one row, in every precision."""
    one = generation(1, 32, NEW)
    unit = "batch 1: new tokens/s"
    targets = ahead("per_s", llama_cpp=1.0, genai=1.0)
    beside_16: dict[str, Any] = {"varies": FP32_BESIDE_16, "targets": ahead("per_s", f16=1.0, bf16=1.0)}
    return [
        case(f"{size}-fp32-b1", f"fp32, {unit}", FP32, one, sure=False, targets=targets),
        case(f"{size}-16bit-b1", f"beside 16 bits, {unit}", BITS_16, one, **beside_16),
        case(f"{size}-8bit-b1", f"8-bit, {unit}", BITS_8, one, targets=targets),
        case(f"{size}-4bit-b1", f"4-bit, {unit}", BITS_4, one, targets=targets),
    ]


def prompt_cases() -> list[Case]:
    """Return the cases of the time to the first token of a long prompt."""
    long = generation(1, PROMPT, 8)
    unit = f"a prompt of {PROMPT} tokens: ms to first token"
    options: dict[str, Any] = {"metric": "ttft_ms", "targets": ahead("ttft_ms", llama_cpp=1.5)}
    return [
        case("0.5b-prompt-fp32", f"fp32, {unit}", FP32, long, sure=False, **options),
        case("0.5b-prompt-8bit", f"8-bit, {unit}", BITS_8, long, **options),
        case("0.5b-prompt-4bit", f"4-bit, {unit}", BITS_4, long, **options),
    ]


def window_case() -> Case:
    """Return the case of milliseconds per token around two positions, with a window in all layers."""
    entries = {}
    for precision in ("fp32", "int8"):
        for position in (NEAR, FAR):
            work = generation(1, position - STEPS // 2, STEPS)
            entries[f"{precision} at {position}"] = Entry(
                "planforge", precision, "windowed-0.5b-sure", work, label=f"position {position}"
            )
    parts = ("prompts", "precision")
    return Case(
        "llama-windows",
        "llama",
        f"Mistral with windows of {WINDOW}, ms per token around position {NEAR} and {FAR:,}",
        entries,
        varies=dict.fromkeys(parts, "positions are compared, not systems"),
        # A step at the far position may take 1.3 times that at the near one.
        targets=tuple(
            Target(f"{precision} at {FAR}", f"{precision} at {NEAR}", "inter_token_ms", 1 / 1.3)
            for precision in ("fp32", "int8")
        ),
        metric="inter_token_ms",
        rounds=3,
        reference="transformers",
    )


def cases(work: Path) -> list[Case]:
    eight = generation(8, 32, NEW)
    return [
        *decode_cases("0.5b"),
        case(
            "0.5b-8bit-b8",
            "8-bit, batch 8: new tokens/s of the batch",
            BITS_8,
            eight,
            targets=ahead("per_s", llama_cpp=1.5, genai=1.0),
        ),
        *prompt_cases(),
        *decode_cases("1b"),
        window_case(),
    ]
