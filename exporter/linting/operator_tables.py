"""Tables of the operators, attributes, outputs and inputs that each engine has, with their sources."""

from __future__ import annotations

from ..targets import RTX_MEASURED, Target
from ..tensorrt_versions import CHANGELOG, OPERATORS, Version


def split_words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# What the parser of TensorRT 8.5 imports, of ONNX's own operators.
IN_8_5 = split_words(
    """
    Abs Acos Acosh Add And ArgMax ArgMin Asin Asinh Atan Atanh AveragePool BatchNormalization Cast Ceil Celu
    Clip Concat Constant ConstantOfShape Conv ConvTranspose Cos Cosh CumSum DepthToSpace DequantizeLinear Div
    Dropout Einsum Elu Equal Erf Exp Expand EyeLike Flatten Floor GRU Gather GatherElements GatherND Gemm
    GlobalAveragePool GlobalLpPool GlobalMaxPool Greater GreaterOrEqual GridSample HardSigmoid HardSwish
    Identity If InstanceNormalization IsNaN LRN LSTM LeakyRelu Less LessOrEqual Log LogSoftmax Loop
    LpNormalization LpPool MatMul Max MaxPool Mean MeanVarianceNormalization Min Mod Mul Neg
    NonMaxSuppression NonZero Not OneHot Or PRelu Pad Pow QuantizeLinear RNN RandomNormal RandomNormalLike
    RandomUniform RandomUniformLike Range Reciprocal ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax
    ReduceMean ReduceMin ReduceProd ReduceSum ReduceSumSquare Relu Reshape Resize ReverseSequence RoiAlign
    Round Scan Scatter ScatterElements ScatterND Selu Shape Shrink Sigmoid Sign Sin Sinh Size Slice Softmax
    Softplus Softsign SpaceToDepth Split Sqrt Squeeze Sub Sum Tan Tanh ThresholdedRelu Tile TopK Transpose
    Trilu Unsqueeze Upsample Where Xor
    """
)

# Operators that came later: the first TensorRT that has each, and where that is written.
SINCE: dict[str, tuple[Version, str]] = {
    **dict.fromkeys(
        ("GroupNormalization", "IsInf", "LayerNormalization"), ((8, 6), OPERATORS.format("8.6-GA"))
    ),
    **dict.fromkeys(("CastLike", "Hardmax"), ((9, 3), OPERATORS.format("release/9.3-GA"))),
    **dict.fromkeys(("Gelu", "Mish"), ((10, 0), OPERATORS.format("10.0-GA"))),
    "DeformConv": ((10, 1), OPERATORS.format("10.1-GA")),
    **dict.fromkeys(("BlackmanWindow", "HammingWindow", "HannWindow"), ((10, 4), CHANGELOG)),
    "STFT": ((10, 5), CHANGELOG),
    "Attention": ((10, 14), CHANGELOG),
    **dict.fromkeys(("RotaryEmbedding", "RMSNormalization", "TensorScatter"), ((10, 15), CHANGELOG)),
    "Swish": ((11, 0), CHANGELOG),
}
# What TensorRT-RTX lacks: an importer of DeformConv; a plugin or kernel of the others, in NVIDIA's package.
RTX_LACKS = frozenset({"DeformConv", "NonMaxSuppression", "NonZero"})

# ONNX Runtime's operators that TensorRT-RTX parses and builds.
RTX_CONTRIB = split_words(
    "DequantizeLinear Gelu MultiHeadAttention QuantizeLinear RotaryEmbedding SkipSimplifiedLayerNormalization"
)
# Older graphs name these operators of ONNX Runtime in ONNX's own domain.
ORT_IN_STANDARD = frozenset({"SimplifiedLayerNormalization"})

# What to do instead of an operator that is not there.
INSTEAD = {
    **dict.fromkeys(
        ("ConvInteger", "DynamicQuantizeLinear", "MatMulInteger", "QLinearConv", "QLinearMatMul"),
        "quantize with QuantizeLinear and DequantizeLinear, int8, zero point 0; keep the dynamically"
        " quantized graph for ONNX Runtime",
    ),
    "Attention": "write it as MatMul, Add, Softmax, MatMul: export at opset 22 or older",
    "Gelu": "write it with Erf or Tanh: export at opset 19 or older, or see docs/deploy/jetson.md",
    "LayerNormalization": "write it with ReduceMean and Sqrt, as docs/deploy/jetson.md does",
    "RMSNormalization": "write it as Mul, ReduceMean, Sqrt, Div: export at opset 22 or older",
    "RotaryEmbedding": "write it as Mul, Neg, Concat, Add: export at opset 22 or older",
    "TensorScatter": "grow the cache with Concat instead (`planforge export --target portable`)",
    "Swish": "write it as Mul and Sigmoid",
    "NonZero": "use a mask of fixed shape",
    **dict.fromkeys(
        ("BiasGelu", "FastGelu", "GatherBlockQuantized", "GroupQueryAttention", "SkipLayerNormalization"),
        "they are for ONNX Runtime: take another graph, `planforge export --target portable` (or rtx)",
    ),
    "MatMulNBits": "store the weight in int4 behind DequantizeLinear, opset 21",
}
OTHERWISE = "rewrite the graph without it, or bring a plugin"

# Attributes that the parser refuses: operator, attribute, the values it takes, from where that is known.
ATTRIBUTES: tuple[tuple[str, str, tuple[object, ...], str], ...] = (
    ("Attention", "softcap", (0.0,), RTX_MEASURED),
    ("Attention", "softmax_precision", (), RTX_MEASURED),
    ("AveragePool", "dilations", (1,), OPERATORS.format("main")),
    ("BatchNormalization", "training_mode", (0,), RTX_MEASURED),
    ("Constant", "sparse_value", (), OPERATORS.format("main")),
    ("Constant", "value_string", (), OPERATORS.format("main")),
    ("Constant", "value_strings", (), OPERATORS.format("main")),
    ("LSTM", "input_forget", (0,), OPERATORS.format("main")),
    ("MaxPool", "dilations", (1,), OPERATORS.format("main")),
    ("Resize", "antialias", (0,), OPERATORS.format("main")),
    ("Resize", "keep_aspect_ratio_policy", ("stretch",), OPERATORS.format("main")),
    ("ScatterND", "reduction", ("none",), OPERATORS.format("main")),
    ("TensorScatter", "mode", ("linear",), RTX_MEASURED),
)
# Attributes of Attention: TensorRT-RTX's parser passes over them in silence, ONNX Runtime does not know them.
WINDOWS = ("left_window_size", "right_window_size")

# How many outputs the parser takes of operators that can have more.
OUTPUTS = {"Attention": 1, "BatchNormalization": 1, "LayerNormalization": 1, "MaxPool": 1}

# Inputs that must be known when the plan is built: their names, the version that ended that, and the source.
CONSTANT_INPUTS: dict[tuple[str, int], tuple[str, Version | None, str]] = {
    **{
        (f"Reduce{name}", 1): ("axes", None, "")
        for name in split_words("L1 L2 LogSum LogSumExp Max Mean Min Prod Sum SumSquare")
    },
    ("CumSum", 1): ("axis", None, ""),
    ("OneHot", 1): ("depth", None, ""),
    ("Squeeze", 1): ("axes", None, ""),
    ("Unsqueeze", 1): ("axes", None, ""),
    ("TopK", 1): ("K", (8, 6), OPERATORS.format("8.5-GA")),
    ("Slice", 3): ("axes", (10, 3), CHANGELOG),
    ("Pad", 3): ("axes", (10, 4), CHANGELOG),
}
TOPK_LIMIT = 3840

# Element types that the parser takes of no operand of an operator, though ONNX does.
OPERAND_TYPES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("Gemm", "MatMul"), ("int32", "int64", "uint32", "uint64")),
    "Erf": ("int32", "int64"),
    "Mod": ("int8",),
    **dict.fromkeys(("ReduceMax", "ReduceMin"), ("bool", "uint8")),
}
RTX_OPERAND_TYPES: dict[str, tuple[str, ...]] = {"Relu": ("int32",)}

# Operators whose output's shape depends on numbers: no CUDA graph, and a buffer of unknown size.
DATA_DEPENDENT = frozenset({"NonMaxSuppression", "NonZero"})


def find_first_version(operator: str, target: Target) -> tuple[Version | None, str]:
    """Return the first version of an engine that has an operator of ONNX's own, and the source.

    The version is (0, 0) if every one has it, None if none has.
    """
    if target.engine == "tensorrt-rtx":
        known = operator in IN_8_5 | SINCE.keys() | ORT_IN_STANDARD
        return ((0, 0) if known and operator not in RTX_LACKS else None), RTX_MEASURED
    if operator in IN_8_5:
        return (0, 0), ""
    return SINCE.get(operator, (None, OPERATORS.format("main")))
