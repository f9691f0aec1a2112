"""The one table of ONNX Runtime's kernels on an NVIDIA GPU: an operator without a row has none.

What has none runs on the CPU: ONNX Runtime copies its inputs there and its results back, at each step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

# It lists the kernels of all opsets; the table here has those from 18 on.
COMMIT = "001d12d2623fd411ce0f83d05abb5e82304a3389"
DOCUMENTED = f"https://github.com/microsoft/onnxruntime/blob/{COMMIT}/docs/OperatorKernels.md"
# Types of kernels are parameters of their classes, whose names a library keeps.
IN_LIBRARY = "compared with the classes in libonnxruntime_providers_cuda.so of onnxruntime-gpu 1.31.1"
MEASURED = "measured with onnxruntime-gpu 1.31.1 on an H200"
INITIALIZER = "ONNX Runtime makes it an initializer when it loads a graph"
WRITTEN_OUT = "ONNX defines it by other operators, and ONNX Runtime, without any kernel of it, runs those"

MICROSOFT = "com.microsoft"


def split(text: str) -> tuple[str, ...]:
    return tuple(text.split())


WIDE = split("float32 float16 float64")  # floats but bfloat16
FLOATS = (*WIDE, "bfloat16")
HALVES = split("float16 bfloat16")
NETWORK = ("float32", *HALVES)
SINGLE = split("float32 float16")
INDEX = split("int32 int64")
COUNTED = (*INDEX, *split("uint32 uint64"))
INTEGERS = (*COUNTED, *split("int8 int16 uint8 uint16"))
NUMBERS = (*FLOATS, *INTEGERS)
ALL = (*NUMBERS, "bool")
FP8 = "float8e4m3fn"
BOTH_FP8 = (FP8, "float8e5m2")
EACH_FP8 = (*BOTH_FP8, *split("float8e4m3fnuz float8e5m2fnuz"))
CAST = (*ALL, *BOTH_FP8, "float4e2m1")
CODES = split("int8 uint8")
ALL_CODES = (*CODES, *split("int4 uint4"), *BOTH_FP8)
CARRIED = (*ALL, *EACH_FP8, "string")  # through a branch or a loop
EYE = split("float32 float64 int32 int64 uint64")


@dataclass(frozen=True)
class Kernel:
    """The kernels of an operator.

    Attributes:
        types: the types that an input, by its number, may have. One that is not here may have any that its
            operator allows, or has the type of one that is.
        source: where that is known from.
        attributes: the values that an attribute may have, by its name.
        results: the types that a result, by its number, may have, where the inputs do not tell.
    """

    types: Mapping[int, tuple[str, ...]]
    source: str = DOCUMENTED
    attributes: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    results: Mapping[int, tuple[str, ...]] = field(default_factory=dict)


def list_alike(names: str, types: tuple[str, ...], domain: str = "") -> dict[str, Kernel]:
    """Return the kernels of operators of which the first input decides, for each the same types."""
    return list_kernels(names, Kernel({0: types}), domain)


def list_kernels(names: str, kernel: Kernel, domain: str = "") -> dict[str, Kernel]:
    """Return the same kernels for each of some operators."""
    prefix = f"{domain}." if domain else ""
    return {f"{prefix}{name}": kernel for name in names.split()}


# By operator, with the domain of those that are not ONNX's own.
KERNELS: Mapping[str, Kernel] = {
    "Constant": Kernel({}, INITIALIZER),
    **list_kernels(
        "Bernoulli CastLike CenterCropPad GroupNormalization Mish NegativeLogLikelihoodLoss SequenceMap"
        " SoftmaxCrossEntropyLoss Swish",
        Kernel({}, WRITTEN_OUT),
    ),
    **list_alike("Abs Add Div Mul Sign Sub", NUMBERS),
    **list_alike("And Not Or Xor", ("bool",)),
    "If": Kernel({0: ("bool",)}, results={0: CARRIED}),
    "Attention": Kernel({0: NETWORK, 2: NETWORK, 3: (*NETWORK, "bool")}),
    **list_alike("Affine ArgMax ArgMin Ceil ConvTranspose Cos Crop DepthToSpace Einsum Elu Floor", WIDE),
    **list_alike("GlobalAveragePool GlobalMaxPool GRU ImageScaler InstanceNormalization LeakyRelu Log", WIDE),
    **list_alike("LogSoftmax LRN LSTM ParametricSoftplus PRelu Reciprocal ReduceLogSum", WIDE),
    **list_alike("ReduceLogSumExp ReduceSumSquare RNN Round ScaledTanh Selu Sin Softplus Softsign", WIDE),
    **list_alike("SpaceToDepth ThresholdedRelu", WIDE),
    "BatchNormalization": Kernel({0: WIDE, 1: WIDE, 3: WIDE}),
    **list_alike("AveragePool Conv Erf Exp Gelu Gemm HardSigmoid HardSwish MatMul Relu Sigmoid", FLOATS),
    **list_alike("Softmax Sqrt Sum Tanh", FLOATS),
    "Dropout": Kernel({0: FLOATS, 1: FLOATS}),
    "LayerNormalization": Kernel({0: FLOATS}, results={1: ("float32",)}),
    **list_kernels("RMSNormalization SimplifiedLayerNormalization", Kernel({0: FLOATS, 1: FLOATS})),
    **list_alike("IsInf IsNaN", (*FLOATS, *EACH_FP8)),
    "Cast": Kernel({0: CAST}, results={0: CAST}),
    **list_alike("Clip", (*WIDE, *split("int64 uint64 int8 uint8"))),
    **list_alike("Compress Concat DynamicSlice Expand Flatten Gather GatherElements ReverseSequence", ALL),
    **list_alike("ScatterElements ScatterND SequenceConstruct Slice Split Squeeze TensorScatter", ALL),
    **list_alike("Transpose Trilu Unsqueeze", ALL),
    **list_alike("Size", (*ALL, "string")),
    **list_alike("Identity MemcpyFromHost MemcpyToHost Reshape Scan Shape", (*ALL, *EACH_FP8)),
    **list_kernels("ConcatFromSequence SequenceEmpty", Kernel({})),
    "SequenceAt": Kernel({1: INDEX}, results={0: ALL}),
    "SequenceErase": Kernel({1: INDEX}),
    "SequenceInsert": Kernel({2: INDEX}),
    "SequenceLength": Kernel({}, results={0: ("int64",)}),
    "ConstantOfShape": Kernel({0: ("int64",)}, results={0: ALL}),
    **list_alike("CumSum Greater GreaterOrEqual Less LessOrEqual", (*WIDE, *COUNTED)),
    "DequantizeLinear": Kernel({0: ALL_CODES, 1: SINGLE}),
    **list_alike("Equal", (*WIDE, *COUNTED, "bool")),
    "EyeLike": Kernel({0: EYE}, results={0: EYE}),
    **list_alike("GatherND", (*FLOATS, "int64", "bool")),
    "GridSample": Kernel({0: ("float32",), 1: ("float32",)}),
    "Loop": Kernel({0: ("int64",), 1: ("bool",), 2: CARRIED}),
    "MatMulInteger": Kernel({0: ("int8",), 1: ("int8",)}),
    **list_alike("Max Min Mod", (*FLOATS, *COUNTED)),
    **list_alike("MaxPool", (*WIDE, *CODES)),
    **list_alike("Neg", (*FLOATS, *split("int8 int16 int32 int64"))),
    **list_alike("NonZero", (*SINGLE, *INDEX, *split("uint8 bool"))),
    "OneHot": Kernel({0: INDEX, 1: INDEX, 2: (*SINGLE, "int64")}),
    **list_alike("Pad", (*WIDE, "bool")),
    "Pow": Kernel({0: (*FLOATS, *INDEX), 1: (*FLOATS, *INDEX)}),
    **list_alike("ReduceSum Tile", (*FLOATS, *INDEX)),
    "QuantizeLinear": Kernel({0: SINGLE, 2: ALL_CODES}, results={0: ALL_CODES}),
    **list_kernels("RandomNormal RandomUniform", Kernel({}, results={0: WIDE})),
    **list_kernels("RandomNormalLike RandomUniformLike", Kernel({0: (*ALL, "string")}, results={0: WIDE})),
    **list_alike("Range", split("float32 float64 int16 int32 int64")),
    **list_alike("ReduceL1 ReduceL2 ReduceMean ReduceProd", (*WIDE, "int32")),
    **list_alike("ReduceMax TopK", (*WIDE, *INDEX)),
    **list_alike("ReduceMin", (*WIDE, *INDEX, *CODES)),
    **list_alike("Resize", (*WIDE, *split("int32 uint8"))),
    **list_alike("RoiAlign", split("float32 float64")),
    **list_alike("RotaryEmbedding", NETWORK),
    **list_alike("Shrink", (*WIDE, *INTEGERS)),
    "Where": Kernel({1: (*FLOATS, *INDEX, "uint8")}),
    **list_alike("Attention MatMulBnb4 MoE MultiHeadAttention RotaryEmbedding", NETWORK, MICROSOFT),
    **list_alike("SkipLayerNormalization SkipSimplifiedLayerNormalization", NETWORK, MICROSOFT),
    **list_alike("BiasDropout BiasGelu BitmaskBiasDropout BitmaskDropout FastGelu", FLOATS, MICROSOFT),
    **list_alike("FusedMatMul Gelu QuickGelu TransposeMatMul", FLOATS, MICROSOFT),
    **list_alike("BiasSoftmax Inverse Irfft Rfft", WIDE, MICROSOFT),
    **list_alike("BiasAdd BiasSplitGelu ComplexMul ComplexMulConj DecoderAttention", SINGLE, MICROSOFT),
    **list_alike("DecoderMaskedMultiHeadAttention DecoderMaskedSelfAttention", SINGLE, MICROSOFT),
    **list_alike("GatedRelativePositionBias GroupNorm LongformerAttention NhwcConv", SINGLE, MICROSOFT),
    **list_alike("PackedAttention PackedMultiHeadAttention QuantizeWithOrder", SINGLE, MICROSOFT),
    **list_alike("RelativePositionBias RemovePadding RestorePadding SkipGroupNorm", SINGLE, MICROSOFT),
    **list_alike("ConvTransposeWithDynamicPads DynamicTimeWarping FusedConv", ("float32",), MICROSOFT),
    **list_alike("DequantizeWithOrder QOrderedAttention QOrderedGelu", ("int8",), MICROSOFT),
    **list_alike("QOrderedLayerNormalization QOrderedLongformerAttention", ("int8",), MICROSOFT),
    **list_alike("QOrderedMatMul", ("int8",), MICROSOFT),
    **list_alike("PagedAttention SparseAttention", HALVES, MICROSOFT),
    **list_alike("NGramRepeatBlock", ("int64",), MICROSOFT),
    **list_alike("Trilu", ALL, MICROSOFT),
    **list_alike("UnfoldTensor", (*ALL, "string"), MICROSOFT),
    **list_kernels("BeamSearch WhisperBeamSearch", Kernel({5: SINGLE}), MICROSOFT),
    **list_kernels("GreedySearch Sampling", Kernel({3: SINGLE}), MICROSOFT),
    "com.microsoft.DequantizeLinear": Kernel({0: CODES, 1: ("float16",)}),
    "com.microsoft.EmbedLayerNormalization": Kernel({2: SINGLE}),
    "com.microsoft.GatherBlockQuantized": Kernel({0: split("int4 uint4 uint8"), 2: NETWORK}),
    "com.microsoft.GemmFloat8": Kernel({0: (*NETWORK, *BOTH_FP8), 1: (*NETWORK, *BOTH_FP8)}),
    "com.microsoft.GemmaRotaryEmbedding": Kernel({0: ("float32",), 1: ("float16",)}),
    "com.microsoft.GridSample": Kernel({0: ("float32",)}, results={0: ("float32",)}),
    "com.microsoft.GroupQueryAttention": Kernel({0: HALVES, 3: (*HALVES, "int8", "uint8", FP8)}, IN_LIBRARY),
    "com.microsoft.MatMulNBits": Kernel({0: NETWORK, 1: ("uint8",)}, IN_LIBRARY, {"bits": (2, 4, 8)}),
    "com.microsoft.QAttention": Kernel({0: ("int8",), 1: ("int8",)}),
    "com.microsoft.QMoE": Kernel({0: HALVES, 2: ("uint8",), 3: HALVES}),
    "com.microsoft.QuantizeLinear": Kernel({0: ("float16",), 2: CODES}, results={0: CODES}),
}

# The operator that computes a decoder's attention on a cache, by dialect; in others plain operators do.
ATTENTION = {"ort": "com.microsoft.GroupQueryAttention"}
QUERY = 0  # inputs of it
CACHE = 3
# It takes a cache in int8 in its flash attention alone ("GQA MEA does not support a quantized KV cache", says
# `IN_LIBRARY`), which is for GPUs of this compute capability and later ones.
QUANTIZED_CACHE_SM = 80


NONE: Mapping[Any, Any] = MappingProxyType({})


def explain_missing(
    operator: str,
    types: Mapping[int, str],
    attributes: Mapping[str, object] = NONE,
    results: Mapping[int, str] = NONE,
) -> str:
    """Return in words why no kernel on a GPU takes a node; "" where one does.

    Args:
        operator: with its domain, unless it is ONNX's own: "com.microsoft.MatMulNBits".
        types: those of its inputs that are known, by number: "float16".
        attributes: its attributes.
        results: the types of its results that are known, by number.
    """
    missing = f"{operator} has no kernel on a GPU"
    kernel = KERNELS.get(operator)
    if kernel is None:
        return missing
    for number, known in kernel.types.items():
        if types.get(number, known[0]) not in known:
            return f"{missing} for {types[number]}, only for {', '.join(known)}"
    for number, known in kernel.results.items():
        if results.get(number, known[0]) not in known:
            return f"{missing} for a result in {results[number]}, only in {', '.join(known)}"
    for name, values in kernel.attributes.items():
        value = attributes.get(name, values[0])
        if value not in values:
            return f"{missing} with {name} {value}, only {', '.join(map(str, values))}"
    return ""


def explain_missing_attention(dialect: str, computes: str, cache: str) -> str:
    """Return in words why no kernel computes a decoder's attention on a GPU; "" where one does.

    Args:
        dialect: the graph's.
        computes: the type that it computes in, "float16" or "float32".
        cache: the type of its cache.
    """
    if dialect not in ATTENTION:
        return ""
    return explain_missing(ATTENTION[dialect], {QUERY: computes, CACHE: cache})
