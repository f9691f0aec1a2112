"""The one table of precisions: the weights, cache and dialects that a name on the command line means."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..runtime.bundle.artifact import IN_HALF, computes_in_half, name_product_type
from ..runtime.errors import InputError
from ..runtime.suggest import did_you_mean
from .number_formats import (
    CPU_INTEGERS,
    FP8,
    PLAN_FLOATS,
    PLAN_INT8,
    PLAN_INTEGERS,
    NumberFormat,
    NumberFormats,
)

# By dialect, the forms in which quantized weights are stored, one after another: see `passes.storage`.
Forms = Mapping[str, tuple[str, ...]]
FLOATS: Forms = dict.fromkeys(("portable", "inplace", "ort"), ())
BLOCKS: Forms = {"ort": ("blocks",)}
ROWS: Forms = {"ort": ("rows", "blocks")}
PLANS: Forms = dict.fromkeys(("portable", "inplace"), ("dequantized",))  # of graphs that plans are built from
HALVES: Forms = {**PLANS, **BLOCKS}  # those, and ONNX Runtime's on a GPU
ENCODERS: Forms = {"portable": PLANS["portable"]}


@dataclass(frozen=True)
class Precision:
    """The storage of weights and cache in one precision."""

    weights: str  # what its weights file is named by; other precisions may share the file
    storage: Forms  # of the dialects whose graphs can have it
    weight_bits: int | None = None  # bits of quantized weights; None where they are floats
    cache_bits: int | None = None  # bits of quantized keys and values; None where they are floats
    # of quantized weights, by their bits
    formats: NumberFormats = field(default_factory=lambda: CPU_INTEGERS)
    # of what an encoder's products read in a plan; None where that stays in fp16
    rows: NumberFormat | None = None
    engine: str = ""  # the one that rounds what a graph in fp32 multiplies, where the graph does not say it

    @property
    def dialects(self) -> tuple[str, ...]:
        """Return the dialects whose graphs can have it."""
        return tuple(self.storage)

    @property
    def is_half(self) -> bool:
        """Return whether it computes in fp16; see `Artifact.is_half`."""
        return computes_in_half(self.weights)

    @property
    def computes_in(self) -> str:
        """Return the type of most of its products, "float16" or "float32"."""
        return name_product_type(self.weights)

    @property
    def keeps_cache_in(self) -> str:
        """Return the type of its keys and values."""
        return "int8" if self.cache_bits else self.computes_in

    @property
    def rounds_rows(self) -> bool:
        """Return whether an encoder's products round what they read by constants that texts decide."""
        return self.rows is not None or "rows" in self.storage.get("ort", ())

    @property
    def is_quantized(self) -> bool:
        """Return whether weights or cache are quantized."""
        return self.weight_bits is not None or self.cache_bits is not None

    @property
    def quantizes_in_half(self) -> bool:
        """Return whether products by quantized weights are in fp16."""
        return self.is_half and self.weight_bits is not None

    @property
    def format(self) -> NumberFormat | None:
        """Return the number format that most weights have; None where they are floats."""
        return None if self.weight_bits is None else self.formats[self.weight_bits]

    @property
    def loses_like(self) -> str:
        """Return the precision whose losses this one may have: fp32, fp16, int8 or int4."""
        if self.engine:  # bf16 has 8 binary digits
            return "int8"
        if self.weight_bits is not None:
            return f"int{self.weight_bits}"
        return self.weights if self.cache_bits is None else "int8"

    @property
    def calibrated(self) -> bool:
        """Return whether real text decides how values are stored."""
        return self.weights != "fp32" or self.cache_bits is not None


PRECISIONS = {
    "fp32": Precision("fp32", FLOATS),
    "fp16": Precision("fp16", FLOATS),
    "int8": Precision("int8", ROWS, weight_bits=8),
    "int4": Precision("int4", BLOCKS, weight_bits=4),
    "fp32-kv8": Precision("fp32", {"ort": ()}, cache_bits=8),
    "int8-kv8": Precision("int8", ROWS, weight_bits=8, cache_bits=8),
    "int4-kv8": Precision("int4", BLOCKS, weight_bits=4, cache_bits=8),
    "fp16-kv8": Precision("fp16", {"ort": ()}, cache_bits=8),
    "w8a16": Precision("w8a16", HALVES, weight_bits=8, formats=PLAN_INTEGERS),
    "w4a16": Precision("w4a16", HALVES, weight_bits=4, formats=PLAN_INTEGERS),
    "w8a16-kv8": Precision("w8a16", BLOCKS, weight_bits=8, cache_bits=8, formats=PLAN_INTEGERS),
    "w4a16-kv8": Precision("w4a16", BLOCKS, weight_bits=4, cache_bits=8, formats=PLAN_INTEGERS),
    "fp8a16": Precision("fp8a16", PLANS, weight_bits=8, formats=PLAN_FLOATS),
    "nvfp4a16": Precision("nvfp4a16", PLANS, weight_bits=4, formats=PLAN_FLOATS),
    "w8a8": Precision("w8a8", ENCODERS, weight_bits=8, formats=PLAN_INTEGERS, rows=PLAN_INT8),
    "bf16": Precision("fp32", {"portable": ()}, engine="openvino"),
    "fp8a8": Precision("fp8a8", ENCODERS, weight_bits=8, formats=PLAN_FLOATS, rows=FP8),
}

BFLOAT16 = "fp32 keeps every weight of a checkpoint in bfloat16 as it is, fp16 rounds some"


def expand_names(names: Sequence[str], in_half: bool) -> list[str]:
    """Return the precisions that a user's names stand for; int8 and int4 for those that multiply in fp16."""
    return [IN_HALF.get(name, name) if in_half or name not in PRECISIONS else name for name in names]


def resolve_precisions(names: Sequence[str]) -> list[str]:
    """Return each name once; refuse unknown names, and an empty list."""
    if not names or not set(names) <= set(PRECISIONS):
        unknown = next((name for name in names if name not in PRECISIONS), "")
        hint = did_you_mean(unknown, PRECISIONS)
        if unknown == "bfloat16":
            hint = f"; {BFLOAT16}, and bf16 is for encoders in OpenVINO"
        raise InputError(f"precision={list(names)} must name one or more of {', '.join(PRECISIONS)}{hint}")
    return list(dict.fromkeys(names))
