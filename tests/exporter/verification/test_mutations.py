"""Proof that verify can fail, and that what it tells a user is right: faults in graphs and around them.

`verify` itself runs on each bundle. Every fault must be caught, and of those in graphs nine of ten must be
named rightly, in each precision. What was told of each is written to build/planted-faults.md.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest

from planforge.exporter import export
from planforge.exporter.exporting import import_folder
from planforge.exporter.verification.bisect import PYTORCH
from planforge.exporter.verification.structure import READING
from planforge.runtime.decoding.dynamic_cache import DynamicCache
from planforge.runtime.decoding.static_cache import StaticCache

from ...conftest import DIALECTS
from ...controls.models import write_control
from ...helpers.fault_table import write_table
from ...helpers.faults import (
    Fault,
    coarse,
    epsilon,
    exchanged_caches,
    exchanged_weights,
    future_after_a_past,
    late_positions,
    low_mask,
    no_mask,
    perturbed,
    rescaled,
    scale_attribute,
    scale_factor,
    swapped,
    swapped_scales,
    transposed,
)
from ...helpers.reading_faults import (
    behind,
    changed_codes,
    doubled_scales,
    exchanged_rows,
    other_epsilon,
    other_rotary_base,
    reads,
    scaled_number,
    zero_points,
)
from ...helpers.verdicts import PlantedBundle, Verdict, keep_answers, sum_up

PRODUCT = ("MatMul",)
NORM = ("LayerNormalization",)
GROUPED = ("GroupQueryAttention",)
BLOCKS = ("MatMulNBits",)
LENGTH = 64  # tokens of a text: each is compared in every length
NAMED = 0.9  # of what is caught


@pytest.fixture(scope="module")
def planted(
    head_bundle: Callable[[str], Path],
    marian_bundle: Path,
    tmp_path_factory: pytest.TempPathFactory,
    request: pytest.FixtureRequest,
) -> Iterator[Callable[[str], PlantedBundle]]:
    """Copies of sound bundles by their families."""
    copies = tmp_path_factory.mktemp("damaged")

    def export_gpt2() -> Path:
        """Return a control's bundle: a random GPT-2 of two layers, in every dialect."""
        folder = tmp_path_factory.mktemp("gpt2")
        write_control(4, folder / "checkpoint")
        options: dict[str, Any] = {"precision": ["fp32", "fp16", "int8", "int4", "fp32-kv8"], "verify": False}
        export(folder / "checkpoint", folder / "bundle", target=DIALECTS, max_length=LENGTH, **options)
        return folder / "bundle"

    def import_llama() -> Path:
        folder = tmp_path_factory.mktemp("llama")
        exported: Path = request.getfixturevalue("exported")
        options: dict[str, Any] = {"target": ["portable"], "precision": ["fp32", "fp16"], "verify": False}
        source = exported / "llama"
        import_folder(exported / "llama.onnx", folder / "bundle", source=source, max_length=LENGTH, **options)
        return folder / "bundle"

    folders = {
        "GPT-2": export_gpt2,
        "BERT": lambda: head_bundle("classifier"),
        "translation": lambda: marian_bundle,
        "imported Llama": import_llama,
    }
    with keep_answers(tmp_path_factory.mktemp("answers")):
        yield functools.cache(lambda family: PlantedBundle(family, folders[family](), copies / family))


@pytest.fixture(scope="module")
def judge(planted: Callable[[str], PlantedBundle]) -> Callable[[str, str, Fault], Verdict]:
    return functools.cache(lambda family, artifact, fault: planted(family).judge(artifact, fault))


@pytest.fixture(scope="module")
def around() -> list[Verdict]:
    """Verdicts of faults in the code around graphs."""
    return []


def decoder_faults(artifact: str) -> list[Fault]:
    layer = [f"h.1.{name}" for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")]
    faults = [
        Fault("a transposed weight", transposed("h.1.attn.c_proj"), "h.1.attn.c_proj", PRODUCT),
        Fault("a layer's weights 1 % off", perturbed(*layer), "h.1.attn.c_attn", PRODUCT),
        Fault("one weight 1 % off", perturbed("h.1.mlp.c_fc"), "h.1.mlp.c_fc", PRODUCT),
        Fault("epsilon 1e-2", epsilon("h.1.ln_2", 1e-2), "h.1.ln_2", NORM),
        Fault("epsilon 1e-6", epsilon("h.1.ln_1", 1e-6), "h.1.ln_1", NORM),
        Fault("a position off by one", late_positions("wpe"), "wpe", ("Gather",)),
        Fault("no mask", no_mask(), "", ("Where",)),
    ]
    if "portable" in artifact:
        faults += [
            Fault("swapped K and V", swapped("h.1.attn", "Concat", index=1), "h.1.attn", ("Concat",)),
            Fault("scores 10 % larger", scale_factor("h.1.attn"), "h.1.attn", ("Mul",)),
        ]
    if "inplace" in artifact:
        swap = swapped("h.1.attn", "TensorScatter", index=1)
        faults += [
            Fault("swapped K and V", swap, "h.1.attn", ("TensorScatter",)),
            Fault("scores 10 % larger", scale_attribute("h.1.attn", "Attention"), "h.1.attn", ("Attention",)),
        ]
    if artifact.endswith("fp16"):
        faults.append(Fault("fp16 overflow: -648 on a mask of -65504", low_mask, "", ("Where",)))
    return faults


def grouped_faults(artifact: str) -> list[Fault]:
    """Faults of what ONNX Runtime alone runs, in any precision."""
    scores = scale_attribute("h.1.attn", "GroupQueryAttention")
    norm = reads("h.1.ln_1", 1, "h.0.ln_1.weight", "LayerNormalization")
    return [
        Fault("scores 10 % larger", scores, "h.1.attn", GROUPED),
        Fault("a position off by one", late_positions("wpe"), "wpe", ("Gather",)),
        Fault("epsilon 1e-2", epsilon("h.1.ln_2", 1e-2), "h.1.ln_2", NORM),
        Fault("another layer's norm", norm, "h.1.ln_1", NORM),
        Fault("keys of another layer", exchanged_caches("key"), "h.0.attn", GROUPED),
    ]


def quantized_faults(artifact: str) -> list[Fault]:
    def wrong_rows(codes: Any) -> None:
        codes[[0, 1]] = codes[[1, 0]]

    exchanged = changed_codes("h.0.attn.c_proj", wrong_rows)
    middle = zero_points("h.1.mlp.c_fc", 100, slice(0, 20))
    bias = reads("h.1.mlp.c_proj", 5, "h.0.attn.c_proj.bias", "MatMulNBits")
    return [
        *grouped_faults(artifact),
        Fault("scales 10 % too large", coarse("h.1.mlp.c_fc"), "h.1.mlp.c_fc", BLOCKS),
        Fault("a block's scale doubled", doubled_scales("h.1.mlp.c_proj"), "h.1.mlp.c_proj", BLOCKS),
        Fault("two outputs exchanged", exchanged, "h.0.attn.c_proj", BLOCKS),
        Fault("two rows of the table exchanged", exchanged_rows(40, 41), "wte", ("GatherBlockQuantized",)),
        Fault("other zero points", middle, "h.1.mlp.c_fc", BLOCKS),
        Fault("another module's bias", bias, "h.1.mlp.c_proj", BLOCKS),
        Fault("a number added", behind("h.1.ln_2", "LayerNormalization", "Add", 0.01), "", ("Add",)),
    ]


def cache_faults(artifact: str) -> list[Fault]:
    return [
        *grouped_faults(artifact),
        Fault("a transposed weight", transposed("h.1.attn.c_proj"), "h.1.attn.c_proj", PRODUCT),
        Fault("one weight 1 % off", perturbed("h.1.mlp.c_fc"), "h.1.mlp.c_fc", PRODUCT),
        Fault("a scale of keys halved", rescaled("cache.1.key", 0.5), "h.1.attn", GROUPED),
        Fault("a scale of values times 20", rescaled("cache.0.value", 20.0), "h.0.attn", GROUPED),
        Fault("scales of keys and values swapped", swapped_scales("h.0.attn"), "h.0.attn", GROUPED),
        Fault("values of another layer", exchanged_caches("value"), "h.0.attn", GROUPED),
    ]


def encoder_faults(artifact: str) -> list[Fault]:
    output = "layers.1.attention.output"
    inner = "layers.0.intermediate"
    norm = "layers.0.output_norm"
    words = "embeddings.positions"
    return [
        Fault("a transposed weight", transposed(output), output, PRODUCT),
        Fault("a layer's weights 1 % off", perturbed(inner, "layers.0.output"), inner, PRODUCT),
        Fault("epsilon 1e-2", epsilon(norm, 1e-2), norm, NORM),
        Fault("no mask", no_mask(), "", ("Where",)),
        Fault("a position off by one", late_positions(words), words, ("Gather",)),
        Fault("scores 10 % larger", scale_factor("layers.1.attention"), "layers.1.attention", ("Mul",)),
    ]


def translator_faults(artifact: str) -> list[Fault]:
    side = artifact.partition(".")[0]
    words = {"encoder": "source", "decoder": "target"}[side]
    output = f"{side}.layers.1.attention.output"
    norm = f"{side}.layers.0.attention_residual.norm"
    inner = f"{side}.layers.1.feed_forward.inner"
    positions = f"{words}.positions"
    faults = [
        Fault("a transposed weight", transposed(output), output, PRODUCT),
        Fault("a layer's weights 1 % off", perturbed(output, inner), output, PRODUCT),
        Fault("epsilon 1e-2", epsilon(norm, 1e-2), norm, NORM),
        Fault("no mask of padding", no_mask(), "", ("Where",)),
        Fault("a position off by one", late_positions(positions), positions, ("Gather", "GatherND")),
    ]
    if side == "decoder":
        faults.append(Fault("the future is seen", no_mask(1), "", ("Where",)))
    if "decoder.inplace" in artifact:
        swap = swapped("decoder.layers.1.attention", "TensorScatter", index=1)
        faults.append(Fault("swapped K and V", swap, "decoder.layers.1.attention", ("TensorScatter",)))
    return faults


def imported_faults(artifact: str) -> list[Fault]:
    """Faults of another exporter's graph, of which PyTorch knows the results of whole modules alone."""
    first, second = (f"model.layers.{layer}" for layer in (0, 1))
    norms = [f"{first}.post_attention_layernorm", f"{second}.input_layernorm"]
    scores = scaled_number(f"{second}.self_attn", "Mul", 1.005)
    output = f"{second}.self_attn.o_proj"
    up, down = f"{second}.mlp.up_proj", f"{first}.mlp.down_proj"
    exchanged = exchanged_weights(f"{first}.self_attn.q_proj", f"{second}.self_attn.q_proj")
    return [
        Fault("a transposed weight", transposed(output), output, PRODUCT),
        Fault("one weight 1 % off", perturbed(up), up, PRODUCT),
        Fault("two weights 1 % off", perturbed(down, up), down, PRODUCT),
        Fault("a weight of another layer", exchanged, f"{first}.self_attn.q_proj", PRODUCT),
        Fault("scores 0.5 % larger", scores, f"{second}.self_attn", ("Mul",)),
        Fault("one norm's epsilon", other_epsilon(norms[1]), norms[1], ("Add", "Mul")),
        Fault("two norms' epsilon, in two layers", other_epsilon(*norms), norms[0], ("Add", "Mul")),
        Fault(
            "rotary base 10,100", other_rotary_base, "model.rotary_emb", ("Expand", "MatMul", "Cos", "Sin")
        ),
    ]


GRAPHS = {
    "GPT-2": {
        "decoder.portable.fp32": decoder_faults,
        "decoder.portable.fp16": decoder_faults,
        "decoder.inplace.fp32": decoder_faults,
        "decoder.ort.int8": quantized_faults,
        "decoder.ort.int4": quantized_faults,
        "decoder.ort.fp32-kv8": cache_faults,
    },
    "BERT": {"encoder.portable.fp32": encoder_faults, "encoder.portable.fp16": encoder_faults},
    "translation": {"encoder.portable.fp16": translator_faults, "decoder.inplace.fp32": translator_faults},
    "imported Llama": {"decoder.portable.fp32": imported_faults, "decoder.portable.fp16": imported_faults},
}
PLANTED = [
    (family, artifact, fault)
    for family, faults_by_artifact in GRAPHS.items()
    for artifact, faults_of in faults_by_artifact.items()
    for fault in faults_of(artifact)
]


@pytest.mark.parametrize(
    ("family", "artifact", "fault"), PLANTED, ids=[f"{f} {a}: {fault.name}" for f, a, fault in PLANTED]
)
def test_a_planted_fault_is_caught(
    judge: Callable[[str, str, Fault], Verdict], family: str, artifact: str, fault: Fault
) -> None:
    assert judge(family, artifact, fault).is_caught


def list_sound() -> Iterator[tuple[str, list[str]]]:
    """Yield the graphs that run together: an encoder does with a decoder of its own precision alone."""
    for family, artifacts in GRAPHS.items():
        if family == "translation":
            yield from ((family, [artifact]) for artifact in artifacts)
        else:
            yield family, list(artifacts)


@pytest.mark.parametrize(("family", "artifacts"), list(list_sound()))
def test_healthy_graphs_have_no_node_at_fault(
    planted: Callable[[str], PlantedBundle], family: str, artifacts: list[str]
) -> None:
    report = planted(family).verify(*artifacts)
    assert report.list_failures() == []
    assert report.list_locations() == []


def stale_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last row's newest key and value are written over the ones before."""
    honest = StaticCache.step

    def step(self: Any, *args: Any) -> Any:
        results = honest(self, *args)
        self.lengths[-1] -= 1
        return results

    monkeypatch.setattr(StaticCache, "step", step)


def stale_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step does not see what the last one wrote."""
    honest = DynamicCache.step

    def step(self: Any, *args: Any) -> Any:
        results = honest(self, *args)
        self.past, self.present = self.present, self.past
        return results

    monkeypatch.setattr(DynamicCache, "step", step)


def nothing(model: ir.Model) -> None:
    """Leave a graph as it is."""


@pytest.mark.parametrize(
    ("artifact", "name", "break_cache"),
    [
        ("decoder.inplace.fp32", "a stale cache row", stale_row),
        ("decoder.ort.fp32", "a stale cache row", stale_row),
        ("decoder.portable.fp32", "a stale cache", stale_buffers),
    ],
)
def test_a_stale_cache_is_caught(
    planted: Callable[[str], PlantedBundle],
    around: list[Verdict],
    monkeypatch: pytest.MonkeyPatch,
    artifact: str,
    name: str,
    break_cache: Callable[[pytest.MonkeyPatch], None],
) -> None:
    own = planted("GPT-2")
    break_cache(monkeypatch)
    report = own.verify(artifact)
    if not report.mismatches:  # the module that reads what is stale was told already
        (read,) = (c for c in report.comparisons if c.backend == READING and not c.passed)
        assert " of h.0.attn gives" in read.failures[0]
        return
    (mismatch,) = report.mismatches
    # The graph is sound, and so the same as the reference: PyTorch alone, which has no cache, contradicts.
    assert mismatch.reference == PYTORCH
    assert mismatch.step == "decode of 2 rows"  # nothing is stale in a prefill
    fault = Fault(f"in the decoder: {name}", nothing, mismatch.module, (mismatch.op_type,))
    around.append(own.read_verdict(report, artifact, fault))


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_beams_whose_cache_rows_are_not_copied_are_caught(
    planted: Callable[[str], PlantedBundle],
    around: list[Verdict],
    monkeypatch: pytest.MonkeyPatch,
    precision: str,
) -> None:
    own = planted("translation")
    artifact = f"decoder.inplace.{precision}"
    monkeypatch.setattr(StaticCache, "copy_rows", lambda self, copies: None)
    report = own.verify(artifact)
    failed = [comparison for comparison in report.comparisons if not comparison.passed]
    assert {(c.artifact, c.case.split(",")[0]) for c in failed} == {(artifact, "4 beams")}
    assert report.mismatches == ()  # the graph is sound
    fault = Fault("in the decoder: beams keep their rows", nothing, "", ())
    around.append(own.read_verdict(report, artifact, fault))


def test_a_fault_of_steps_of_several_tokens_is_caught(
    planted: Callable[[str], PlantedBundle], around: list[Verdict]
) -> None:
    own = planted("GPT-2")
    fault = Fault("the future is seen after a past", future_after_a_past, "", ("And", "Where", "Or"))
    with own.damaged("decoder.portable.fp32", fault):
        report = own.verify("decoder.portable.fp32")
    failed = [comparison for comparison in report.comparisons if not comparison.passed]
    assert {comparison.case.split(",")[0] for comparison in failed} >= {"parts of 7 tokens"}
    verdict = own.read_verdict(report, "decoder.portable.fp32", fault)
    assert verdict.is_right  # in the drawn batch that failed: a step of a single token has no future
    around.append(verdict)


def test_padding_on_the_wrong_side_is_caught(planted: Callable[[str], PlantedBundle]) -> None:
    own = planted("GPT-2")
    path = own.folder / "manifest.json"
    sound = path.read_text(encoding="utf-8")
    assert '"padding_side": "right"' in sound
    path.write_text(sound.replace('"padding_side": "right"', '"padding_side": "left"'), encoding="utf-8")
    try:
        report = own.verify("decoder.inplace.fp32")
    finally:
        path.write_text(sound, encoding="utf-8")
    said = 'decoder.inplace.fp32: padding_side is "left", the checkpoint\'s is "right"'
    assert any(said in line for line in report.list_failures())


def test_nine_of_ten_are_named_rightly(
    judge: Callable[[str, str, Fault], Verdict], around: list[Verdict]
) -> None:
    verdicts = [judge(*fault) for fault in PLANTED]
    counts = sum_up(verdicts)
    write_table("named-faults", ("graphs", "planted", "caught", "named rightly"), counts)
    rows = [(v.graph, v.fault, v.caught_by, v.describe_name()) for v in (*verdicts, *around)]
    write_table("planted-faults", ("graph", "fault", "caught by", "node named"), rows)
    assert {name for name, *_ in counts} > {"fp32", "fp16", "int8", "int4", "fp32-kv8"}
    few = [(name, caught, right) for name, _, caught, right in counts if int(right) < NAMED * int(caught)]
    assert few == []
