"""The verification itself: it must fail where it should, and say what it compared."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
import onnx.parser
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch

from planforge.exporter import verify
from planforge.exporter.calibration.prompts import read_prompts
from planforge.exporter.checkpoints.source import DEMOS
from planforge.exporter.errors import CheckpointError, VerificationError
from planforge.exporter.execution.node_executor import NodeExecutor, NotFiniteError
from planforge.exporter.limits import compute_limits
from planforge.exporter.verification import verify as verify_module
from planforge.exporter.verification.structure import READING
from planforge.runtime.apps.check import metrics as metrics_module
from planforge.runtime.apps.check.metrics import Metrics, TextMetrics, measure, measure_kl
from planforge.runtime.apps.check.outcome import judge
from planforge.runtime.bundle.bundle import Bundle

from ...helpers.faults import epsilon, low_mask
from ...helpers.graphs import replace_graph

# A score of -648 on top of the mask that people take from finfo(float16).min is -inf in fp16, and a
# row of nothing but -inf is NaN after Softmax. In fp32, where ONNX Runtime computes it, all is well.
# (ONNX text gives fp16 by its bits: 64511 is -65504, 26624 is 2048.)
MASK_FAULT = """
<ir_version: 10, opset_import: ["" : 20]>
attention (float16[n] scores) => (float16[n] weights)
<float16 mask = {64511}>
{
    masked = Add (scores, mask)
    weights = Softmax (masked)
}
"""


def logits(seed: int = 0) -> npt.NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal((6, 50)).astype(np.float32) * 3


@pytest.mark.parametrize("rows", [1, 4, 6, 100])
def test_metrics_are_those_of_their_definitions_however_rows_are_cut(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are computed for some rows at a time: results of a large vocabulary take gigabytes."""
    monkeypatch.setattr(metrics_module, "CACHED_VALUES", rows * 50)
    want = 2 * logits()
    got = want + logits(1)
    found = measure(got, want)
    centred = want - want.mean(-1, keepdims=True)
    errors = np.abs(got - want) / centred.std()
    shared = [
        len(set(np.argsort(a)[-5:]) & set(np.argsort(b)[-5:])) / 5 for a, b in zip(got, want, strict=True)
    ]
    assert found.max_error == pytest.approx(errors.max(), rel=1e-5)
    assert found.mean_error == pytest.approx(errors.mean(), rel=1e-5)
    assert found.top5_agreement == pytest.approx(np.mean(shared))
    assert found.top1_agreement == (got.argmax(-1) == want.argmax(-1)).mean()
    assert metrics_module.measure_max_error(got, want) == pytest.approx(errors.max(), rel=1e-5)
    for place in ((0, 0), (5, 49)):
        bad = got.copy()
        bad[place] = np.nan
        assert not measure(bad, want).finite and not measure(want, bad).finite
        assert np.isnan(metrics_module.measure_max_error(bad, want))


def test_measured_kl_is_torchs() -> None:
    want = logits()
    got = logits() + np.float32(0.1) * logits(1)
    expected = torch.nn.functional.kl_div(
        torch.from_numpy(got).log_softmax(-1),
        torch.from_numpy(want).log_softmax(-1),
        reduction="batchmean",
        log_target=True,
    )
    metrics = measure(got, want)
    assert metrics.mean_kl == pytest.approx(expected.item(), rel=1e-4)
    spread = (want - want.mean(-1, keepdims=True)).std()
    assert metrics.max_error == pytest.approx(np.abs(got - want).max() / spread, rel=1e-5)


def test_a_flip_is_told_with_its_margin() -> None:
    want = np.array([[0.0, 1.0, 0.99], [0.0, 5.0, 1.0]], np.float32)
    got = np.array([[0.0, 0.99, 1.0], [0.0, 5.0, 1.0]], np.float32)
    metrics = measure(got, want)
    assert metrics.top1_agreement == 0.5
    assert metrics.flip_margin == pytest.approx(0.01, abs=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("side", ["got", "want"])
def test_what_is_not_finite_never_passes(bad: float, side: str) -> None:
    values = {"got": logits(), "want": logits()}
    values[side][3, 7] = bad
    for limits in ({"max_error": np.inf, "mean_kl": np.inf}, compute_limits("fp32", None), {}):
        assert judge(measure(**values), limits)


def test_limits_are_three_times_the_gap_under_a_cap() -> None:
    gap = Metrics(0.01, 0.001, 1e-6, 1.0, 1.0, 0.0, True, 9)
    assert compute_limits("fp16", gap) == {
        "max_error": pytest.approx(0.03),
        "mean_kl": pytest.approx(9e-6),
    }
    wide = dataclasses.replace(gap, max_error=99.0, mean_kl=99.0)
    assert compute_limits("fp16", wide) == {"max_error": 0.1, "mean_kl": 1e-3}
    with pytest.raises(ValueError, match="not finite"):
        compute_limits("fp16", dataclasses.replace(gap, finite=False))


@pytest.mark.parametrize("precision", ["fp16", "int8", "fp32-kv8", "int4"])
def test_a_limit_is_never_below_fp32s(precision: str) -> None:
    """Rounding may lose nothing on a text, and engines still add in another order."""
    nothing = Metrics(0.0, 0.0, -1.2e-17, 1.0, 1.0, 0.0, True, 9)
    assert compute_limits(precision, nothing) == compute_limits("fp32", None)
    text = TextMetrics(-1.2e-17, 0.0, 0.0, True, 9)
    assert (
        compute_limits(precision, text, TextMetrics.LIMITED)["text_kl"]
        == compute_limits("fp32", None, TextMetrics.LIMITED)["text_kl"]
    )
    sound = measure(logits(), logits())
    assert not judge(sound, compute_limits(precision, nothing))


def test_divergence_is_never_negative() -> None:
    """Rounding leaves sums a little below zero, where two are nearly alike."""
    random = np.random.default_rng(0)
    want = random.standard_normal((2000, 300)).astype(np.float32) * 8
    got = want + random.standard_normal(want.shape).astype(np.float32) * np.float32(1e-7)
    divergence = measure_kl(want, got)
    assert divergence.min() == 0.0
    log_p, log_q = (torch.from_numpy(array).double().log_softmax(-1) for array in (want, got))
    theirs = torch.nn.functional.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)
    assert theirs.min() < 0
    np.testing.assert_allclose(divergence, theirs.numpy(), atol=1e-12)


def test_onnx_runtime_passes_the_mask_fault_and_the_executor_finds_it() -> None:
    proto = onnx.parser.parse_model(MASK_FAULT)
    scores = np.full(4, -648, np.float16)
    passed = ort.InferenceSession(proto.SerializeToString()).run(None, {"scores": scores})[0]
    assert np.isfinite(passed).all()
    with pytest.raises(NotFiniteError, match=r"masked.*Add.*reaches 65504"):
        NodeExecutor(ir.from_proto(proto)).run({"scores": scores})


ATTENTION = """
<ir_version: 12, opset_import: ["" : 24]>
attention (float16[1,1,2,8] q, float16[1,1,4,8] k, float16[1,1,4,8] v, float16[1,1,2,4] mask)
    => (float16[1,1,2,8] y)
{
    y = Attention <scale: float = 0.25, is_causal: int = 0> (q, k, v, mask)
}
"""


@pytest.mark.parametrize("low", [-30000.0, -65504.0])
def test_attention_is_executed_in_parts(low: float) -> None:
    random = np.random.default_rng(3)
    q, k, v = (random.standard_normal((1, 1, n, 8)).astype(np.float16) for n in (2, 4, 4))
    mask = np.array([[[[0, 0, low, low], [low, low, low, low]]]], np.float16)
    if low < -60000:
        q *= 30  # the masked scores leave fp16's range: a row of -inf
        k *= -np.sign(q[0, 0, 1] * k[0, 0])
    model = ir.from_proto(onnx.parser.parse_model(ATTENTION))
    feeds = {"q": q, "k": k, "v": v, "mask": mask}
    if low < -60000:
        with pytest.raises(NotFiniteError, match="masked scores"):
            NodeExecutor(model).run(feeds)
        return
    exact_q, exact_k, exact_v, exact_mask = (torch.from_numpy(x).double() for x in (q, k, v, mask))
    expected = torch.nn.functional.scaled_dot_product_attention(
        exact_q, exact_k, exact_v, attn_mask=exact_mask, scale=0.25
    )
    got = NodeExecutor(model).run(feeds)["y"]
    np.testing.assert_allclose(got[..., 0, :], expected.numpy()[..., 0, :], atol=4 * 2**-11)
    assert np.isfinite(got[..., 1, :]).all()  # a row with nothing to see: any mixture of v will do


def test_the_executor_rounds_after_every_node() -> None:
    text = MASK_FAULT.replace("{64511}", "{26624}").replace(
        "weights = Softmax (masked)", "weights = Sub (masked, mask)"
    )
    scores = np.array([0.3, 1.7, 5.1], np.float16)
    executed = NodeExecutor(ir.from_proto(onnx.parser.parse_model(text))).run({"scores": scores})
    mask = np.float16(2048)
    np.testing.assert_array_equal(executed["weights"], (scores + mask) - mask)  # numpy rounds each step
    assert (executed["weights"] != scores).any()


@pytest.mark.parametrize("graph", ["decoder", "encoder"])
def test_a_mask_beyond_fp16_is_found_by_the_executor_alone(
    graph: str, demo_bundle: Path, head_bundle: Callable[[str], Path], tmp_path: Path
) -> None:
    sound = demo_bundle if graph == "decoder" else head_bundle("classifier")
    source = "gpt2-demo" if graph == "decoder" else sound.parent / "classifier"
    bundle = Path(shutil.copytree(sound, tmp_path / "bundle"))
    artifact = f"{graph}.portable.fp16"
    replace_graph(bundle, artifact, low_mask)
    report = verify(bundle, source=source, only=[artifact], level="quick")
    failed = [c for c in report.comparisons if not c.passed]
    assert {c.artifact for c in failed} == {artifact}
    # Scores of the decoder lose digits in fp32 to what is added, which modules show; of engines the executor
    # alone finds it.
    shown = {READING} if graph == "decoder" else set()
    assert {c.backend for c in failed} == {*shown, "node by node, rounded to fp16"}
    assert "inf" in str(failed[-1].failures)


def test_without_the_checkpoint_golden_data_judges(own_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify_module, "find_recorded_source", lambda bundle: None)
    report = verify(own_bundle, only=["decoder.ort.fp32"])
    assert report.passed
    assert not report.with_pytorch
    replace_graph(own_bundle, "decoder.inplace.fp32", epsilon("h.0.ln_1", 1e-2))
    assert not verify(own_bundle, only=["decoder.inplace.fp32"]).passed
    with pytest.raises(VerificationError, match="--source"):
        verify(own_bundle, prompts="prompts.txt")


def record_folder(bundle: Path) -> Path:
    """Let a bundle of gpt2-demo name a folder beside it as its checkpoint; return the folder, a copy."""
    checkpoint = Path(shutil.copytree(DEMOS / "gpt2-demo", bundle.parent / "checkpoint"))
    path = bundle / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["source"] |= {"kind": "folder", "argument": "../checkpoint"}
    path.write_text(json.dumps(manifest))
    return checkpoint


def test_a_recorded_checkpoint_that_is_refused_leaves_golden_data_to_judge(
    own_bundle: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = record_folder(own_bundle)
    opened = Bundle.open(own_bundle)
    assert verify_module.load_checkpoint(opened, verify_module.VerifyOptions()) is not None
    assert not caplog.messages
    # An adapter beside the model, which its hash does not count.
    (checkpoint / "adapter_config.json").write_text("{}")
    report = verify(own_bundle, only=["decoder.ort.fp32"])
    assert report.passed and not report.with_pytorch
    assert "holds an adapter" in caplog.text and "comparing with golden data instead" in caplog.text
    with pytest.raises(CheckpointError, match="holds an adapter"):  # who names it wants it
        verify(own_bundle, source=checkpoint)
    with pytest.raises(CheckpointError, match="holds an adapter"):
        verify(own_bundle, prompts=checkpoint / "config.json")
    (checkpoint / "adapter_config.json").unlink()
    caplog.clear()

    def refuse(folder: Path, config: object) -> None:  # as a later version might
        raise ValueError(f"{folder}: this version refuses it")

    monkeypatch.setattr("planforge.models.checkpoint.refuse_kind", refuse)
    assert verify_module.load_checkpoint(opened, verify_module.VerifyOptions()) is None
    assert "this version refuses it; comparing with golden data instead" in caplog.text


def test_an_older_bundle_without_metadata_is_compared_with_golden_data(
    own_bundle: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def remove_metadata(model: ir.Model) -> None:
        model.metadata_props.clear()
        for value in model.graph.initializers.values():
            value.metadata_props.clear()

    for artifact in Bundle.open(own_bundle).manifest.artifacts:
        if artifact.precision == "fp32":  # the plan is bound to the one in fp16
            replace_graph(own_bundle, artifact.id, remove_metadata)
    report = verify(own_bundle, only=["decoder.ort.fp32"])
    assert report.passed and not report.with_pytorch
    assert "was exported by an older PlanForge" in caplog.text
    with pytest.raises(VerificationError, match="export it again"):
        verify(own_bundle, source=DEMOS / "gpt2-demo")


def test_another_checkpoint_is_no_reference(demo_bundle: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(DEMOS / "gpt2-demo", tmp_path / "other"))
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "layer_norm_epsilon": 1e-3}))
    with pytest.raises(VerificationError, match="not the checkpoint"):
        verify(demo_bundle, source=other)


def test_prompts_may_be_the_users_own(demo_bundle: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("And it came to pass\\nin those days\nThe LORD spake unto Moses\n")
    wanted = ["And it came to pass\nin those days", "The LORD spake unto Moses"]
    assert read_prompts(prompts) == wanted
    prompts.write_bytes("\ufeff".encode() + prompts.read_bytes())
    assert read_prompts(prompts) == wanted
    report = verify(demo_bundle, prompts=prompts, only=["decoder.ort.fp32"], level="quick")
    assert report.passed
    assert report.with_pytorch
    (text,) = [c for c in report.comparisons if c.case.startswith("real text")]
    assert set(text.limits) == {"text_kl"}  # too few tokens to count in
    assert text.metrics["perplexity_change"] is not None


@pytest.mark.parametrize("content", [b"", b"\n \n", b"\xff\xfe\xff"])
def test_prompts_that_cannot_be_used_are_named(tmp_path: Path, content: bytes) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_bytes(content)
    with pytest.raises(VerificationError, match=r"prompts\.txt"):
        read_prompts(prompts)


def test_every_case_of_the_issue_is_compared(demo_bundle: Path) -> None:
    parity = next((demo_bundle / "checks").glob("parity-*.json"))
    report = json.loads(parity.read_text())
    cases = {(c["artifact"], c["backend"], c["case"]) for c in report["comparisons"]}
    for dialect in ("ort", "portable", "inplace"):
        for precision in ("fp32", "fp16") if dialect != "ort" else ("fp32",):
            found = {
                case
                for artifact, engine, case in cases
                if artifact == f"decoder.{dialect}.{precision}" and engine == "ort-cpu"
            }
            assert found == {
                "prefill and decode, batch 1",
                "greedy, 2 prompts, padded",
                "greedy, 8 prompts, padded",
                "parts of 7 tokens, batch 1",
                "parts of 7 tokens, 7 prompts, padded",
                "prompts of 128, 129 tokens",
                "full context",
                "real text",
                "random batches, padded, seed 0",
                "single steps at positions 1 to 255",
            }
        assert (
            dialect == "ort"
            or (
                f"decoder.{dialect}.fp16",
                "node by node, rounded to fp16",
                "prefill of every position",
            )
            in cases
        )
    rows = {c["metrics"]["rows"] for c in report["comparisons"] if c["case"].startswith("prefill and decode")}
    assert min(rows) >= 3 * 32
