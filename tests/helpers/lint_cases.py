"""Small graphs, each with what lint must say of it."""

from __future__ import annotations

from .lint import Case

MS = ("com.microsoft",)


QKV = "float[1,2,3,8] q, float[1,2,5,8] k, float[1,2,5,8] v"


HALF_QKV = QKV.replace("float", "float16")


OUT = "float[1,2,3,8] y"


CACHE = "float[batch,4,16,8] c, float[batch,4,t,8] u, int64[batch] w"


SLOTS = "float[batch,4,16,8] y"


ONE = {"t": (1, 1, 1), "p": (2, 3, 4)}  # a past of more than one, which no broadcast explains


X = "float[2,4] x"


Y = "float[2,4] y"


WEIGHTS = "int8[4,2] w = {1, 2, 3, 4, 5, 6, 7, 8}, float s = {0.1}"


THEN = "then_branch = t () => (float[2,4] a) { a = Relu(x) }"


BODY = "body = b (int64 i, bool ci, float[{0},4] a) => (bool co, float[{1},4] o)"


BAD = [
    # Operators
    Case(
        "dynamic-quantize",
        "operator-unsupported",
        f"({X}) => (uint8[2,4] y, float s, uint8 z) {{ y, s, z = DynamicQuantizeLinear(x) }}",
    ),
    Case(
        "matmul-integer",
        "operator-unsupported",
        "(int8[2,4] a, int8[4,3] b) => (int32[2,3] y) { y = MatMulInteger(a, b) }",
    ),
    Case("unique", "operator-unsupported", "(float[4] x) => (float[n] y) { y = Unique(x) }"),
    Case("bernoulli", "operator-unsupported", f"({X}) => ({Y}) {{ y = Bernoulli(x) }}"),
    Case("non-zero", "operator-unsupported", f"({X}) => (int64[2,n] y) {{ y = NonZero(x) }}"),
    Case(
        "sequence",
        "operator-unsupported",
        f"({X}) => ({Y}) <int64 i = {{0}}> {{ s = SequenceConstruct(x, x) y = SequenceAt(s, i) }}",
    ),
    Case(
        "inside-a-branch",
        "operator-unsupported",
        f"(bool c, {X}) => ({Y}) {{ y = If(c) <{THEN},"
        " else_branch = e () => (float[2,4] b) { b = Bernoulli(x) }> }",
    ),
    Case(
        "skip-layer-norm",
        "operator-foreign",
        "(float[2,3,4] x, float[2,3,4] s, float[4] g, float[4] b) => (float[2,3,4] y)"
        " { y = com.microsoft.SkipLayerNormalization(x, s, g, b) }",
        domains=MS,
    ),
    Case(
        "group-query-attention",
        "operator-foreign",
        "(float16[1,1,64] q, float16[1,1,64] k, float16[1,1,64] v, float16[1,1,8,64] a, float16[1,1,8,64] b,"
        " int32[1] l, int32 t) => (float16[1,1,64] y, float16[1,1,8,64] c, float16[1,1,8,64] d) { y, c, d ="
        " com.microsoft.GroupQueryAttention <num_heads = 1, kv_num_heads = 1, scale = 0.125>"
        "(q, k, v, a, b, l, t) }",
        domains=MS,
    ),
    Case(
        "matmul-n-bits",
        "operator-foreign",
        "(float16[2,64] x, uint8[8,2,16] w, float16[16] s) => (float16[2,8] y) { y ="
        " com.microsoft.MatMulNBits <K = 64, N = 8, bits = 4, block_size = 32>(x, w, s) }",
        domains=MS,
    ),
    # Their form
    Case(
        "softcap",
        "attribute-unsupported",
        f"({QKV}) => ({OUT}) {{ y = Attention <softcap = 5.0>(q, k, v) }}",
        24,
    ),
    Case(
        "softmax-precision",
        "attribute-unsupported",
        f"({QKV}) => ({OUT}) {{ y = Attention <softmax_precision = 1>(q, k, v) }}",
        24,
    ),
    Case(
        "dilations",
        "attribute-unsupported",
        "(float[1,1,8,8] x) => (float[1,1,6,6] y)"
        " { y = MaxPool <kernel_shape = [2, 2], dilations = [2, 2]>(x) }",
    ),
    Case(
        "scatter-nd-add",
        "attribute-unsupported",
        "(float[4] x, int64[2,1] i, float[2] u) => (float[4] y)"
        ' { y = ScatterND <reduction = "add">(x, i, u) }',
    ),
    Case(
        "scatter-elements-add",
        "scatter-reduction",
        "(float[4] x, int64[2] i, float[2] u) => (float[4] y)"
        ' { y = ScatterElements <axis = 0, reduction = "add">(x, i, u) }',
    ),
    Case(
        "norm-with-statistics",
        "outputs-unsupported",
        f"({X}, float[4] s, float[4] b) => ({Y}, float[2,1] m, float[2,1] i)"
        " { y, m, i = LayerNormalization(x, s, b) }",
    ),
    Case(
        "scores-as-output",
        "outputs-unsupported",
        f'({QKV}) => ({OUT}, float[1,2,3,5] s) {{ y, "", "", s = Attention(q, k, v) }}',
        24,
    ),
    Case(
        "axes-fed",
        "input-not-constant",
        f"({X}, int64[1] a) => (float[n,m] y) {{ y = ReduceSum(x, a) }}",
    ),
    Case(
        "unsqueeze-fed",
        "input-not-constant",
        f"({X}, int64[1] a) => (float[n,m,k] y) {{ y = Unsqueeze(x, a) }}",
    ),
    Case(
        "depth-fed",
        "input-not-constant",
        "(int64[2] x, int64 d) => (float[2,n] y) <float[2] v = {0, 1}> { y = OneHot(x, d, v) }",
    ),
    Case(
        "top-4000",
        "topk-limit",
        "(float[2,9000] x) => (float[2,4000] y, int64[2,4000] i) <int64[1] k = {4000}> { y, i = TopK(x, k) }",
    ),
    Case(
        "matmul-of-integers",
        "operand-type",
        "(int64[2,4] x, int64[4,2] z) => (int64[2,2] y) { y = MatMul(x, z) }",
    ),
    Case("relu-of-int32", "operand-type", "(int32[2,4] x) => (int32[2,4] y) { y = Relu(x) }"),
    Case("mod-of-floats", "mod-of-floats", f"({X}, float[2,4] z) => ({Y}) {{ y = Mod(x, z) }}"),
    Case(
        "dropout-in-training",
        "training",
        f"({X}) => ({Y}) <float r = {{0.5}}, bool t = {{1}}> {{ y = Dropout(x, r, t) }}",
    ),
    Case(
        "branches-of-two-ranks",
        "control-flow",
        f"(bool c, {X}) => (float[n,m] y) {{ y = If(c) <{THEN},"
        " else_branch = e () => (float[8] b) <int64[1] s = {8}> { b = Reshape(x, s) }> }",
    ),
    Case(
        "loop-that-grows",
        "control-flow",
        f"({X}) => (float[n,4] y) <int64 n = {{3}}, bool k = {{1}}> {{ y = Loop(n, k, x)"
        f"<{BODY.format('q', 'r')} {{ co = Identity(ci) o = Concat <axis = 0>(a, a) }}> }}",
    ),
    # Attention and its cache
    Case(
        "past-in-attention",
        "attention-past",
        "(float[1,2,3,8] q, float[1,2,3,8] k, float[1,2,3,8] v, float[1,2,4,8] a, float[1,2,4,8] b)"
        f' => ({OUT}) {{ y = Attention(q, k, v, "", a, b) }}',
        24,
    ),
    Case(
        "causal-with-mask",
        "attention-causal-mask",
        f"({QKV}, float[3,5] m) => ({OUT}) {{ y = Attention <is_causal = 1>(q, k, v, m) }}",
        24,
    ),
    Case(
        "float-mask-of-half",
        "attention-types",
        f"({HALF_QKV}, float[3,5] m) => (float16[1,2,3,8] y) {{ y = Attention(q, k, v, m) }}",
        24,
    ),
    Case(
        "circular-cache",
        "attribute-unsupported",
        f'({CACHE}) => ({SLOTS}) {{ y = TensorScatter <axis = -2, mode = "circular">(c, u, w) }}',
        24,
    ),
    Case(
        "cache-along-another-axis",
        "cache-form",
        "(float[batch,16,4,8] c, float[batch,t,4,8] u, int64[batch] w) => (float[batch,16,4,8] y)"
        " { y = TensorScatter <axis = 1>(c, u, w) }",
        24,
    ),
    Case(
        "cache-of-three-axes",
        "cache-form",
        "(float[batch,16,8] c, float[batch,t,8] u, int64[batch] w) => (float[batch,16,8] y)"
        " { y = TensorScatter <axis = -2>(c, u, w) }",
        24,
    ),
    Case(
        "cache-in-int8",
        "cache-form",
        f"({CACHE.replace('float', 'int8')}) => (int8[batch,4,16,8] y)"
        " { y = TensorScatter <axis = -2>(c, u, w) }",
        24,
    ),
    Case(
        "cache-of-unknown-length",
        "cache-length",
        f"({CACHE.replace('16', 'S')}) => (float[batch,4,S,8] y)"
        " { y = TensorScatter <axis = -2>(c, u, w) }",
        24,
        ranges={"S": (16, 16, 16)},
    ),
    Case(
        "cache-that-is-computed",
        "cache-binding",
        f"({CACHE}) => ({SLOTS}) {{ d = Relu(c) y = TensorScatter <axis = -2>(d, u, w) }}",
        24,
    ),
    Case(
        "update-that-stays-inside",
        "cache-binding",
        f"({CACHE}) => (float[batch,4,16,8] z) {{ y = TensorScatter <axis = -2>(c, u, w) z = Identity(y) }}",
        24,
    ),
    # Types and quantization
    Case("int16-input", "type-unsupported", f"(int16[2,4] x) => ({Y}) {{ y = Cast <to = 1>(x) }}"),
    Case(
        "cast-to-uint32",
        "type-unsupported",
        f"({X}) => ({Y}) {{ d = Cast <to = 12>(x) y = Cast <to = 1>(d) }}",
    ),
    Case("strings", "type-unsupported", "(string[2] x) => (string[2] y) { y = Identity(x) }"),
    Case("uint8-transposed", "uint8-inside", "(uint8[2,4] x) => (uint8[4,2] y) { y = Transpose(x) }"),
    Case(
        "uint8-computed",
        "uint8-inside",
        f"({X}) => ({Y}) {{ d = Cast <to = 2>(x) y = Cast <to = 1>(d) }}",
    ),
    Case(
        "int8-table",
        "quantized-constant",
        f"(int64[2] i) => (float[2,2] y) <{WEIGHTS}>"
        " { g = Gather(w, i) c = Cast <to = 1>(g) y = Mul(c, s) }",
    ),
    Case(
        "zero-point-3",
        "quantization-form",
        f"({X}) => ({Y}) <float s = {{0.1}}, int8 z = {{3}}>"
        " { q = QuantizeLinear(x, s, z) y = DequantizeLinear(q, s, z) }",
    ),
    Case(
        "uint8-weights",
        "quantization-form",
        f"({X}) => (float[2,2] y) <{WEIGHTS.replace('int8', 'uint8')}>"
        " { d = DequantizeLinear(w, s) y = MatMul(x, d) }",
    ),
    Case(
        "scale-below-zero",
        "quantization-form",
        f"({X}) => ({Y}) <float s = {{-0.1}}, int8 z = {{0}}>"
        " { q = QuantizeLinear(x, s, z) y = DequantizeLinear(q, s, z) }",
    ),
    Case("root-of-integers", "type-invalid", "(int64[2,4] x) => (int64[2,4] y) { y = Sqrt(x) }"),
    Case(
        "sum-of-two-types",
        "mixed-types",
        "(float16[2,4] x, float[4] s) => (float16[2,4] y) { y = Add(x, s) }",
    ),
    Case(
        "norm-of-two-types",
        "mixed-types",
        "(float16[2,4] x, float[4] s, float[4] b) => (float16[2,4] y) { y = LayerNormalization(x, s, b) }",
    ),
    Case(
        "branches-of-two-types",
        "mixed-types",
        f"(bool c, {X}) => ({Y}) {{ y = If(c) <{THEN},"
        " else_branch = e () => (float16[2,4] b) { b = Cast <to = 10>(x) }> }",
    ),
    # Axes and the graph
    Case(
        "mask-named-as-past",
        "dimension-name",
        "(float[1,p,4] x, float[1,t,4] n, float[1,p,4] m) => (float[1,s,4] y)"
        " { c = Concat <axis = 1>(x, n) y = Add(c, m) }",
        ranges=ONE,
    ),
    Case(
        "scores-by-past",
        "dimension-name",
        "(float[2,p] q, float[p,4] k, float[t,4] n) => (float[2,4] y)"
        " { c = Concat <axis = 0>(k, n) y = MatMul(q, c) }",
        ranges=ONE,
    ),
    Case(
        "keys-longer-than-values",
        "dimension-name",
        "(float[1,2,t,8] q, float[1,2,p,8] k, float[1,2,p,8] v, float[1,2,t,8] n) => (float[1,2,t,8] y)"
        " { c = Concat <axis = 2>(k, n) y = Attention(q, c, v) }",
        24,
        ranges=ONE,
    ),
    Case("ghost", "tensor-undefined", f"({X}) => ({Y}) {{ y = Add(x, ghost) }}"),
    Case("cycle", "cycle", f"({X}) => ({Y}) {{ y = Add(x, z) z = Relu(y) }}"),
    Case("left-out", "input-left-out", f'({X}) => ({Y}) {{ y = Relu("") }}'),
]
