"""An ONNX graph of a bundle: its tensors, their meaning, and the lengths of their axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..errors import ManifestError
from .json_reader import FILE_NAME, Reader, check_file_name, check_word

SLOTS = "slots"  # the axis of a cache's capacity, fixed in a plan
RECENT = "recent"  # that of a layer's cache which holds the newest tokens alone
# Roles and names of scalars in the host's memory: how many slots the longest row has filled behind a step, of
# layers with `SLOTS` and of those with `RECENT`.
TOTAL = "total_sequence_length"
WINDOW_TOTAL = "window_total_sequence_length"
ADAPTERS = "adapter_slots"  # role and name of each row's adapter, 0 for none
# Roles and names of each row's likeliest tokens, where the engine chooses them.
CANDIDATES = ("candidate_logits", "candidate_ids", "log_sum")
# Roles of what a text becomes for retrieval: a vector, weights of the vocabulary's words (B, V) or of its
# tokens (B, T), and a vector for each token.
DENSE = "sentence_embedding"
SPARSE = "sparse_embedding"
WEIGHTS = "token_weights"
VECTORS = "token_vectors"
FEED = "state.feed"  # the role of a recurrent decoder's state that begins with zeros
DTYPES = ("float32", "float16", "int64", "int32", "bool", "int8", "uint8")


@dataclass(frozen=True)
class Axis:
    """A dynamic axis: its name and the lengths a graph was made for."""

    name: str
    min: int
    opt: int
    max: int

    def __post_init__(self) -> None:
        if not 0 <= self.min <= self.opt <= self.max:
            raise ManifestError(
                f"axis {self.name!r}: min {self.min}, opt {self.opt}, max {self.max} are not in order"
            )


@dataclass(frozen=True)
class TensorSpec:
    """An input or output of a graph. An axis is an `Axis`, or an integer where it is fixed."""

    name: str
    role: str
    dtype: str
    axes: tuple[Axis | int, ...]

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ManifestError(f"tensor {self.name!r}: dtype {self.dtype!r} is not one of {DTYPES}")

    @property
    def is_given_by_encoder(self) -> bool:
        """Return whether it is an input of a decoder that its encoder computes: of a source, or a state."""
        return self.role.startswith(("cross.", "state.")) and self.role != FEED

    def axis_names(self) -> tuple[str | int, ...]:
        return tuple(a.name if isinstance(a, Axis) else a for a in self.axes)

    def to_json(self) -> dict[str, Any]:
        axes = [[a.name, a.min, a.opt, a.max] if isinstance(a, Axis) else a for a in self.axes]
        return {"name": self.name, "role": self.role, "dtype": self.dtype, "axes": axes}

    @staticmethod
    def from_json(value: Any) -> TensorSpec:
        r = Reader(value, "tensor")
        return TensorSpec(
            r.get("name", str),
            r.get("role", str),
            r.get("dtype", str),
            tuple(_read_axis(axis) for axis in r.get("axes", list)),
        )


def has_role(specs: Sequence[TensorSpec], prefix: str) -> bool:
    """Tell whether there is a tensor whose role begins so."""
    return any(spec.role.startswith(prefix) for spec in specs)


# What these mean in a graph that computes in fp16, as plans' do, and ONNX Runtime's on a GPU.
IN_HALF = {
    "int8": "w8a16",
    "int4": "w4a16",
    "int8-kv8": "w8a16-kv8",
    "int4-kv8": "w4a16-kv8",
    "fp8": "fp8a16",
    "nvfp4": "nvfp4a16",
}
# The most that two neighbouring codes of a weight may add up to. Processors without VNNI add their products
# with uint8 in 16 bits: 255 * 128 fits, 255 * 129 does not.
PAIR_TOP = 128
CACHE_SUFFIX = "-kv8"  # of precisions with keys and values in int8
# The most exact first.
EXACTNESS = (
    "fp32",
    "fp16",
    "bf16",
    "fp32-kv8",
    "fp16-kv8",
    "w8a16",
    "w8a16-kv8",
    "fp8a16",
    "w8a8",
    "fp8a8",
    "int8",
    "int8-kv8",
    "w4a16",
    "w4a16-kv8",
    "nvfp4a16",
    "int4",
    "int4-kv8",
)


def rank_exactness(precision: str) -> int:
    """Return the place of a precision among all, that of the most exact being 0; an unknown one is last."""
    return EXACTNESS.index(precision) if precision in EXACTNESS else len(EXACTNESS)


def computes_in_half(precision: str) -> bool:
    """Return whether graphs in a precision compute in fp16, but for products of two 8-bit factors.

    Its name ends with the bits of activations; behind them may be those of the cache.
    """
    return precision.removesuffix(CACHE_SUFFIX).endswith(("16", "a8"))


def name_product_type(precision: str) -> str:
    """Return the type of most products of graphs in a precision, "float16" or "float32"."""
    return "float16" if computes_in_half(precision) else "float32"


@dataclass(frozen=True)
class Artifact:
    """One ONNX graph: `graph` in a `dialect` and a `precision`."""

    graph: str
    dialect: str
    precision: str
    opset: int
    file: str
    data: tuple[str, ...]
    padding_side: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    aliases: Mapping[str, str] = field(default_factory=dict)  # output name -> input at its address
    constraints: tuple[str, ...] = ()
    window: int | None = None  # how many of the newest tokens layers see whose cache has the axis `RECENT`
    computes_sizes: bool = False  # whether nodes read sizes that others compute, which a GPU would read early
    quantization: Mapping[str, Any] = field(default_factory=dict)  # how it was quantized
    gate: Mapping[str, Any] = field(default_factory=dict)

    @property
    def id(self) -> str:
        return f"{self.recipe_id}.{self.precision}"

    @property
    def recipe_id(self) -> str:
        """The id of the recipe that its graph was traced by, which those of all precisions share."""
        return f"{self.graph}.{self.dialect}"

    @property
    def is_half(self) -> bool:
        """Return whether it computes in fp16, whatever its weights are in."""
        return computes_in_half(self.precision)

    @property
    def may_saturate(self) -> bool:
        """Return whether sums of two of its uint8 and int8 products may not fit into 16 bits."""
        return self.quantization.get("pair_top") != PAIR_TOP

    @property
    def fuses_scores(self) -> bool:
        """Return whether a UNet's attention is one node each, which never has all of its scores on a CPU.

        Graphs in fp16 are for GPUs, where nobody has measured it yet.
        """
        return self.graph == "unet" and self.dialect == "ort" and not self.is_half

    @property
    def computes_in(self) -> str:
        """Return the type of most of its products, "float16" or "float32"."""
        return name_product_type(self.precision)

    @property
    def has_half_weights(self) -> bool:
        """Return whether all its weights are in fp16."""
        return self.precision.removesuffix(CACHE_SUFFIX) == "fp16"

    @property
    def keeps_cache(self) -> bool:
        """Return whether it runs on top of keys and values of a past: a decoder."""
        return has_role(self.inputs, "past.")

    @property
    def keeps_state(self) -> bool:
        """Return whether each of its steps replaces states of fixed size: a recurrent decoder."""
        return has_role(self.inputs, "state.")

    @property
    def reads_source(self) -> bool:
        """Return whether it reads what an encoder makes of a source."""
        return has_role(self.inputs, "cross.") or self.keeps_state

    @property
    def reads_neighbours(self) -> bool:
        """Return whether it is a decoder that an encoder reads a chunk of, with the chunk's neighbours."""
        return has_role(self.outputs, "chunk")

    @property
    def passed(self) -> bool:
        """Return whether it was compared with PyTorch and found to be the same."""
        return self.gate.get("passed") is True

    def input(self, role: str) -> TensorSpec:
        return _find_role(self.inputs, role, self.id)

    def output(self, role: str) -> TensorSpec:
        return _find_role(self.outputs, role, self.id)

    def axis(self, name: str) -> Axis:
        """Return the dynamic axis of that name, wherever it occurs among the inputs."""
        for spec in self.inputs:
            for axis in spec.axes:
                if isinstance(axis, Axis) and axis.name == name:
                    return axis
        raise ManifestError(f"artifact {self.id} has no axis {name!r}")

    def has_axis(self, name: str) -> bool:
        """Tell whether there is such a dynamic axis among the inputs."""
        return any(name in spec.axis_names() for spec in self.inputs)

    def add_candidates(self, count: int) -> Artifact:
        """Return it with outputs for the `count` likeliest tokens and the log-sum-exp of all logits."""
        *rows, _ = self.output("logits").axes
        types = ("float32", "int32", "float32")
        more = tuple(
            TensorSpec(name, name, dtype, (*rows, length))
            for name, dtype, length in zip(CANDIDATES, types, (count, count, 1), strict=True)
        )
        return replace(self, outputs=(*self.outputs, *more))

    def to_json(self) -> dict[str, Any]:
        value: dict[str, Any] = {
            "id": self.id,
            "graph": self.graph,
            "dialect": self.dialect,
            "precision": self.precision,
            "opset": self.opset,
            "file": self.file,
            "data": list(self.data),
            "padding_side": self.padding_side,
            "inputs": [t.to_json() for t in self.inputs],
            "outputs": [t.to_json() for t in self.outputs],
            "aliases": dict(self.aliases),
            "constraints": list(self.constraints),
        }
        if self.window is not None:
            value["window"] = self.window
        if self.computes_sizes:
            value["computes_sizes"] = True
        if self.quantization:
            value["quantization"] = dict(self.quantization)
        value["gate"] = dict(self.gate)
        return value

    @staticmethod
    def from_json(value: Any) -> Artifact:
        r = Reader(value, "artifact")
        return Artifact(
            graph=check_word(r.get("graph", str)),
            dialect=check_word(r.get("dialect", str)),
            precision=check_word(r.get("precision", str)),
            opset=r.get("opset", int),
            file=check_file_name(r.get("file", str)),
            data=tuple(check_file_name(name) for name in r.list_of("data", str)),
            padding_side=r.get("padding_side", str),
            inputs=tuple(TensorSpec.from_json(t) for t in r.get("inputs", list)),
            outputs=tuple(TensorSpec.from_json(t) for t in r.get("outputs", list)),
            aliases=r.texts("aliases"),
            constraints=r.list_of("constraints", str, ()),
            window=r.get("window", int, None),
            computes_sizes=r.flag("computes_sizes", False),
            quantization=r.get("quantization", dict, {}),
            gate=r.get("gate", dict),
        )


def _read_axis(value: Any) -> Axis | int:
    if type(value) is int and value >= 0:
        return value
    if isinstance(value, list) and [type(v) for v in value] == [str, int, int, int]:
        return Axis(*value)
    raise ManifestError(f"{FILE_NAME}: axis must be [name, min, opt, max] or a number, not {value!r:.60}")


def _find_role(specs: Sequence[TensorSpec], role: str, owner: str) -> TensorSpec:
    for spec in specs:
        if spec.role == role:
            return spec
    raise ManifestError(f"artifact {owner} has no tensor with role {role!r}")
