"""The one table of ONNX Runtime's kernels on an NVIDIA GPU, of the operators that graphs here have.

What has none runs on the CPU: ONNX Runtime copies its inputs there and its results back, at each step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

# It lists the kernels of all opsets; the table here has those from 18 on.
COMMIT = "001d12d2623fd411ce0f83d05abb5e82304a3389"
DOCUMENTED = f"https://github.com/microsoft/onnxruntime/blob/{COMMIT}/docs/OperatorKernels.md"
# Types of kernels are parameters of their classes, whose names a library keeps.
IN_LIBRARY = "compared with the classes in libonnxruntime_providers_cuda.so of onnxruntime-gpu 1.31.1"
MEASURED = "measured with onnxruntime-gpu 1.31.1 on an H200"

MICROSOFT = "com.microsoft"


def split(text: str) -> tuple[str, ...]:
    return tuple(text.split())


WIDE = split("float32 float16 float64")  # floats but bfloat16
FLOATS = (*WIDE, "bfloat16")
HALVES = split("float16 bfloat16")
NETWORK = ("float32", *HALVES)
COUNTED = split("int32 int64 uint32 uint64")
INTEGERS = (*COUNTED, *split("int8 int16 uint8 uint16"))
NUMBERS = (*FLOATS, *INTEGERS)
ALL = (*NUMBERS, "bool")
FP8 = "float8e4m3fn"


@dataclass(frozen=True)
class Kernel:
    """The kernels of an operator.

    Attributes:
        types: the types that an input, by its number, may have; none is possible where no kernel is.
        source: where that is known from.
        attributes: the values that an attribute may have, by its name.
    """

    types: Mapping[int, tuple[str, ...]]
    source: str = DOCUMENTED
    attributes: Mapping[str, tuple[object, ...]] = field(default_factory=dict)


def list_alike(names: str, types: tuple[str, ...], input: int = 0, domain: str = "") -> dict[str, Kernel]:
    """Return the kernels of operators of which one input decides, for each the same types."""
    prefix = f"{domain}." if domain else ""
    return {f"{prefix}{name}": Kernel({input: types}) for name in names.split()}


# By operator, with the domain of those that are not ONNX's own.
KERNELS: Mapping[str, Kernel] = {
    **list_alike("Add Div Mul Sub Abs", NUMBERS),
    **list_alike("And Not Or Xor", ("bool",)),
    **list_alike("Attention RotaryEmbedding", NETWORK),
    **list_alike("Cast", (*ALL, FP8, "float8e5m2")),
    **list_alike("Clip", (*WIDE, *split("int64 uint64 int8 uint8"))),
    **list_alike("Concat Expand Flatten Gather GatherElements ScatterND Slice", ALL),
    **list_alike("Split Squeeze TensorScatter Transpose Trilu Unsqueeze Size", ALL),
    **list_alike("Identity Reshape Shape", (*ALL, FP8)),
    **list_alike("ConstantOfShape", ("int64",)),
    **list_alike("ArgMax Cos Floor Log Reciprocal Sin", WIDE),
    **list_alike("CumSum Greater GreaterOrEqual Less LessOrEqual", (*WIDE, *COUNTED)),
    "DequantizeLinear": Kernel(
        {0: split("int8 uint8 int4 uint4 float8e4m3fn float8e5m2"), 1: split("float32 float16")}
    ),
    "DynamicQuantizeLinear": Kernel({0: ()}),
    **list_alike("Equal", (*WIDE, *COUNTED, "bool")),
    **list_alike("Erf Exp Gelu Gemm LayerNormalization MatMul Relu RMSNormalization", FLOATS),
    **list_alike("Sigmoid SimplifiedLayerNormalization Softmax Sqrt Tanh", FLOATS),
    **list_alike("GatherND", (*FLOATS, "int64", "bool")),
    **list_alike("If", ("bool",)),
    "MatMulInteger": Kernel({0: ("int8",), 1: ("int8",)}),
    **list_alike("Max Min Mod", (*FLOATS, *COUNTED)),
    **list_alike("Neg", (*FLOATS, *split("int8 int16 int32 int64"))),
    **list_alike("Pow ReduceSum Tile", (*FLOATS, "int32", "int64")),
    **list_alike("QuantizeLinear", split("float32 float16")),
    **list_alike("Range", split("float32 float64 int16 int32 int64")),
    **list_alike("ReduceL2 ReduceMean ReduceProd", (*WIDE, "int32")),
    **list_alike("ReduceMax TopK", (*WIDE, "int32", "int64")),
    **list_alike("ReduceMin", (*WIDE, *split("int32 int64 int8 uint8"))),
    **list_alike("Where", (*FLOATS, *split("int32 int64 uint8")), input=1),
    **list_alike("Attention MultiHeadAttention RotaryEmbedding", NETWORK, domain=MICROSOFT),
    **list_alike("BiasGelu FastGelu FusedMatMul Gelu QuickGelu", FLOATS, domain=MICROSOFT),
    **list_alike("DynamicQuantizeMatMul MatMulIntegerToFloat", (), domain=MICROSOFT),
    "com.microsoft.DequantizeLinear": Kernel({0: split("int8 uint8"), 1: ("float16",)}),
    "com.microsoft.GatherBlockQuantized": Kernel({0: split("int4 uint4 uint8"), 2: NETWORK}),
    "com.microsoft.GroupQueryAttention": Kernel({0: HALVES, 3: (*HALVES, "int8", "uint8", FP8)}, IN_LIBRARY),
    "com.microsoft.MatMulNBits": Kernel({0: NETWORK, 1: ("uint8",)}, IN_LIBRARY, {"bits": (2, 4, 8)}),
    "com.microsoft.QuantizeLinear": Kernel({0: ("float16",)}),
    **list_alike("SkipLayerNormalization SkipSimplifiedLayerNormalization", NETWORK, domain=MICROSOFT),
}

# What ONNX Runtime leaves on the CPU because it computes shapes, of a few whole numbers. It has kernels of
# all these on a GPU too.
SHAPE_OPERATORS = frozenset(
    {
        "Abs", "Add", "And", "Cast", "Concat", "Constant", "ConstantOfShape", "Div", "Equal", "Expand",
        "Flatten", "Gather", "Greater", "GreaterOrEqual", "Identity", "If", "Less", "LessOrEqual",
        "Max", "MemcpyFromHost", "MemcpyToHost", "Min", "Mod", "Mul", "Neg", "Not", "Or", "Range",
        "ReduceMax", "ReduceMin", "ReduceProd", "ReduceSum", "Reshape", "Shape", "Size", "Slice",
        "Split", "Squeeze", "Sub", "Tile", "Unsqueeze", "Where",
    }
)  # fmt: skip

# The operator that computes a decoder's attention on a cache, by dialect; in others plain operators do.
ATTENTION = {"ort": "com.microsoft.GroupQueryAttention"}
QUERY = 0  # inputs of it
CACHE = 3
# It takes a cache in int8 in its flash attention alone ("GQA MEA does not support a quantized KV cache", says
# `IN_LIBRARY`), which is for GPUs of this compute capability and later ones.
QUANTIZED_CACHE_SM = 80


def explain_missing(
    operator: str, types: Mapping[int, str], attributes: Mapping[str, object] | None = None
) -> str:
    """Return in words why no kernel on a GPU takes a node; "" where one does, or none is known of.

    Args:
        operator: with its domain, unless it is ONNX's own: "com.microsoft.MatMulNBits".
        types: those of its inputs that are known, by number: "float16".
        attributes: its attributes.
    """
    kernel = KERNELS.get(operator)
    if kernel is None:
        return ""
    for number, known in kernel.types.items():
        if not known:
            return f"{operator} has no kernel on a GPU"
        if types.get(number, known[0]) not in known:
            return f"{operator} has no kernel on a GPU for {types[number]}, only for {', '.join(known)}"
    for name, values in kernel.attributes.items():
        value = (attributes or {}).get(name, values[0])
        if value not in values:
            return (
                f"{operator} has no kernel on a GPU with {name} {value}, only {', '.join(map(str, values))}"
            )
    return ""


def explain_missing_attention(dialect: str, computes: str, cache: str) -> str:
    """Return in words why no kernel computes a decoder's attention on a GPU; "" where one does.

    Args:
        dialect: the graph's.
        computes: the type that it computes in, "float16" or "float32".
        cache: the type of its cache.
    """
    return explain_missing(ATTENTION.get(dialect, ""), {QUERY: computes, CACHE: cache})
