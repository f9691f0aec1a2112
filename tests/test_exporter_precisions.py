"""Which precisions an export can have, how blocks are chosen, and what real text says of a decoder.

V vocabulary, T tokens
"""

from __future__ import annotations

import dataclasses
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from planforge.exporter import export
from planforge.exporter.calibration import chosen_blocks
from planforge.exporter.checkpoint import Checkpoint
from planforge.exporter.errors import ExportError
from planforge.exporter.graphs import planned
from planforge.exporter.passes.quantize import QuantizeWeights
from planforge.exporter.pipeline import default_precisions
from planforge.exporter.precisions import PRECISIONS, checked_precisions
from planforge.exporter.source import DEMOS, resolve_source
from planforge.exporter.verification.gate import CAPS, Gaps, Metrics, judge, limits_for
from planforge.exporter.verification.passages import (
    GOLDEN_ROWS,
    PASSAGE_TOKENS,
    Passage,
    TextMetrics,
    from_arrays,
    measure_text,
    passage_of,
    to_arrays,
    windows,
)
from planforge.exporter.verification.report import read_golden, write_golden
from planforge.exporter.verification.rounding import Rounding
from planforge.runtime.errors import InputError

from .helpers_models import edit_json

Array = npt.NDArray[np.float32]
DEMO_NAMES = ("gpt2-demo", "bert-demo", "transformer-demo")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checkpoint]:
    """The demos, and "heads of 4": gpt2-demo with 64 heads."""
    odd = Path(shutil.copytree(DEMOS / "gpt2-demo", tmp_path_factory.mktemp("odd") / "odd"))
    edit_json(odd / "config.json", n_head=64)
    found = {name: Checkpoint(resolve_source(name)) for name in DEMO_NAMES}
    return {**found, "heads of 4": Checkpoint(resolve_source(odd))}


@pytest.mark.parametrize(
    ("model", "targets", "precisions", "ids"),
    [
        ("gpt2-demo", "cpu", "fp32", "decoder.ort.fp32"),
        ("gpt2-demo", "cpu", "int8-kv8,fp32", "decoder.ort.int8-kv8 decoder.ort.fp32"),
        ("gpt2-demo", "cpu,rtx", "fp16,int8", "decoder.inplace.fp16 decoder.ort.int8"),
        (
            *("gpt2-demo", "cpu,portable", "fp32,int4"),
            "decoder.ort.fp32 decoder.portable.fp32 decoder.ort.int4",
        ),
        ("transformer-demo", "cpu", "int8", "encoder.ort.int8 decoder.ort.int8"),
        ("heads of 4", "cpu", "fp32", "decoder.portable.fp32"),
        ("heads of 4", "cpu,portable", "fp16", "decoder.portable.fp16"),
    ],
)
def test_each_target_gets_its_graphs_in_what_they_can_be(
    checkpoints: dict[str, Checkpoint], model: str, targets: str, precisions: str, ids: str
) -> None:
    artifacts = planned(checkpoints[model], targets.split(","), precisions.split(","))
    assert [artifact.id for artifact in artifacts] == ids.split()
    assert len({artifact.file for artifact in artifacts}) == len(artifacts)


def test_precisions_of_the_same_weights_share_a_file_and_caches_are_typed(
    checkpoints: dict[str, Checkpoint],
) -> None:
    names = list(PRECISIONS)
    artifacts = planned(checkpoints["gpt2-demo"], ["cpu", "rtx"], names)
    data = {(a.precision, a.dialect): a.data for a in artifacts}
    for bits in ("fp32", "int8", "int4"):
        assert data[bits, "ort"] == data[f"{bits}-kv8", "ort"]
    assert data["fp32", "ort"] == data["fp32", "inplace"]
    assert len(set(data.values())) == 4  # fp32, fp16, int8, int4
    for artifact in artifacts:
        cache = {s.dtype for s in (*artifact.inputs, *artifact.outputs) if "cache" in s.name or "." in s.name}
        expected = "int8" if "kv8" in artifact.precision else "float16"
        assert cache == {expected if artifact.precision not in ("fp32", "int8", "int4") else "float32"}
        assert artifact.output("logits").dtype == "float32"


HEADS = "head size is no multiple of 8.*GroupQueryAttention needs. Leave it out, or export fp32"


@pytest.mark.parametrize(
    ("model", "targets", "precisions", "words"),
    [
        ("gpt2-demo", "cpu", "fp16", "'fp16' is for .*decoder.ort only.*add the target portable"),
        ("gpt2-demo", "portable", "int8", "'int8' is for .*decoder.portable only.*add the target cpu"),
        ("gpt2-demo", "cpu,rtx", "int8,int4", "'rtx' gets the decoder.inplace .* not int8, int4"),
        ("gpt2-demo", "cpu", "fp32,fp16", "'fp16' is for .*portable.*decoder.ort only.*add the target port"),
        ("gpt2-demo", "rtx", "fp16,fp32-kv8", "'fp32-kv8' .*decoder.inplace only.*add the target cpu"),
        ("bert-demo", "cpu", "fp32-kv8", "'fp32-kv8' is for models that generate text; export 'fp32'"),
        ("bert-demo", "cpu", "fp32,int8-kv8", "'int8-kv8' is for models that generate .* export 'int8'"),
        ("transformer-demo", "cpu", "fp32-kv8", "'fp32-kv8' is for models that generate text"),
        ("transformer-demo", "cpu,portable", "fp32,int4-kv8", "'int4-kv8' is .* export 'int4'"),
        ("heads of 4", "cpu", "fp32,int8", f"'int8' .*decoder.portable only, because its {HEADS}"),
        ("heads of 4", "cpu", "fp32,fp32-kv8", f"'fp32-kv8' .*, because its {HEADS}"),
        ("heads of 4", "cpu", "int8", HEADS),
    ],
)
def test_what_a_model_or_target_cannot_have_is_refused(
    checkpoints: dict[str, Checkpoint], model: str, targets: str, precisions: str, words: str
) -> None:
    with pytest.raises(InputError, match=words):
        planned(checkpoints[model], targets.split(","), precisions.split(","))


@pytest.mark.parametrize("names", [[], ["fp64"], ["fp32", "int3"], ["INT8"], "int8"])
def test_unknown_precisions_list_the_known(names: list[str]) -> None:
    known = "fp32, fp16, int8, int4, fp32-kv8, int8-kv8, int4-kv8"
    with pytest.raises(InputError, match=f"must name one or more of {known}$"):
        checked_precisions(names)


def test_a_precision_counts_once_and_the_first_stays_first() -> None:
    assert checked_precisions(["int4", "fp32", "int4", "fp32"]) == ["int4", "fp32"]


@pytest.mark.parametrize(
    ("targets", "precisions"),
    [
        (["cpu"], ["fp32"]),
        (["portable"], ["fp32", "fp16"]),
        (["rtx"], ["fp32", "fp16"]),
        (["cpu", "rtx"], ["fp32", "fp16"]),
    ],
)
def test_unless_told_otherwise_a_target_gets_floats(targets: list[str], precisions: list[str]) -> None:
    assert default_precisions(targets) == precisions


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"precision": ["int8"], "target": ["portable"]}, "add the target cpu"),
        ({"precision": ["int3"]}, "must name one or more of"),
        ({"precision": ["fp16"], "target": ["cpu"]}, "add the target portable"),
    ],
)
def test_an_export_refuses_at_once(tmp_path: Path, options: Any, words: str) -> None:
    stages: list[str] = []
    with pytest.raises(InputError, match=words):
        export("gpt2-demo", tmp_path / "B", progress=stages.append, **options)
    assert stages == [] and list(tmp_path.iterdir()) == []


def weights(**widths: int) -> dict[str, Callable[[], Array]]:
    """Functions that give a weight (40, width) each."""
    random = np.random.default_rng(0)
    arrays = {n: random.standard_normal((40, width)).astype(np.float32) for n, width in widths.items()}
    return {name: lambda array=array: array for name, array in arrays.items()}  # type: ignore[misc]


class Asked:
    """A model whose loss is given: good, or bad by one measure, for each rounding that is tried."""

    def __init__(self, *losses: dict[str, float]) -> None:
        self.losses = list(losses)
        self.roundings: list[Rounding] = []

    def __call__(self, rounding: Rounding) -> Gaps:
        self.roundings.append(rounding)
        loss = self.losses.pop(0)
        metrics = Metrics(loss.get("max_error", 0.0), loss.get("mean_kl", 0.0), 1.0, 0.0, True, 9)
        text = {name: loss.get(name, 0.0) for name in TextMetrics.LIMITED}
        return {"": metrics, "text": TextMetrics(**text, finite=True, rows=9)}


def numbers_in(weight: Array, size: int) -> int:
    """The most different numbers that a block has."""
    return max(len(np.unique(block)) for block in weight.reshape(-1, size))


GOOD: dict[str, float] = {}
# Half of a cap is for the rounding of weights; the caps are those of the design.
BAD8 = {"text_kl": 0.0026, "top1_changes": 0.011, "perplexity_change": 0.0051}
BAD4 = {"text_kl": 0.051, "top1_changes": 0.051, "perplexity_change": 0.041}
WELL8 = {"text_kl": 0.0024, "top1_changes": 0.0099, "perplexity_change": 0.0049}
WELL4 = {"text_kl": 0.049, "top1_changes": 0.049, "perplexity_change": 0.039}


@pytest.mark.parametrize(("bits", "bad", "well"), [(8, BAD8, WELL8), (4, BAD4, WELL4)])
def test_the_largest_block_well_inside_the_caps_is_taken(
    bits: int, bad: dict[str, float], well: dict[str, float]
) -> None:
    given = weights(a=256, b=128)
    for name in (*bad, "nan"):
        loss = {"text_kl": math.nan} if name == "nan" else {name: bad[name]}
        for losses, size in (
            ((well,), 128),
            ((loss, well), 64),
            ((loss, loss, well), 32),
            ((loss, loss, loss), 32),
        ):
            asked = Asked(*losses)
            found = chosen_blocks(given, bits, {}, asked)
            assert (found.size, len(asked.roundings)) == (size, len(losses))
            assert {name: blocks.size for name, blocks in found.done.items()} == {"a": size, "b": size}
            for rounding, tried in zip(asked.roundings, (128, 64, 32), strict=False):
                assert set(rounding.weights) == {"a", "b"} and not rounding.cache_scales
                assert all(array.shape == given[name]().shape for name, array in rounding.weights.items())
                if bits == 4:  # 16 whole numbers; two blocks have scales of their own
                    assert numbers_in(rounding.weights["a"], tried) <= 16
                    assert tried == 128 or numbers_in(rounding.weights["a"], 2 * tried) > 16


@pytest.mark.parametrize(
    ("widths", "sizes"), [((256, 96), [32]), ((64, 192), [64, 32]), ((384, 128), [128, 64, 32])]
)
def test_only_blocks_that_divide_all_widths_are_tried(widths: tuple[int, int], sizes: list[int]) -> None:
    asked = Asked(*[BAD4] * len(sizes))
    found = chosen_blocks(weights(a=widths[0], b=widths[1]), 4, {}, asked)
    assert (found.size, len(asked.roundings)) == (32, len(sizes))
    assert chosen_blocks(weights(a=widths[0], b=widths[1]), 4, {}, Asked(GOOD)).size == sizes[0]


def test_a_width_that_no_block_divides_is_named_with_the_way_out() -> None:
    given = weights(**{"h.0.attn.c_attn.weight": 64, "h.0.mlp.c_fc.weight": 40})
    with pytest.raises(ExportError) as caught:
        chosen_blocks(given, 4, {}, Asked())
    words = str(caught.value)
    assert all(word in words for word in ("int4", "h.0.mlp.c_fc.weight", "40", "multiple of 32"))
    assert "export fp32" in words
    with pytest.raises(ValueError, match="multiple of the block of 32"):
        QuantizeWeights(4, 32).blocks("odd", given["h.0.mlp.c_fc.weight"])


def test_the_caps_are_those_of_the_design() -> None:
    names = ("text_kl", "top1_changes", "perplexity_change")
    for precision, caps in (("int8", (0.005, 0.02, 0.01)), ("int4", (0.1, 0.1, 0.08))):
        for name in (precision, f"{precision}-kv8"):
            assert tuple(CAPS[name][n] for n in names) == caps
    assert CAPS["fp32-kv8"] == CAPS["int8"]
    assert set(CAPS) == set(PRECISIONS)


def log(*probabilities: float) -> list[float]:
    return [math.log(p) for p in probabilities]


def by_hand() -> tuple[Passage, Array]:
    """Three predictions of four tokens, PyTorch's and an engine's."""
    want = np.array([log(0.5, 0.25, 0.25), log(0.1, 0.8, 0.1), log(0.2, 0.2, 0.6)], np.float32)
    got = np.array([log(0.25, 0.5, 0.25), log(0.1, 0.8, 0.1), log(0.3, 0.2, 0.5)], np.float32)
    # An offset of all logits of a row changes no probability.
    return passage_of((2, 0, 1, 0), want + 5), got - 3


def test_what_text_says_is_what_the_formulas_say() -> None:
    passage, got = by_hand()
    kl = [
        0.5 * math.log(0.5 / 0.25) + 0.25 * math.log(0.25 / 0.5),
        0.0,
        0.2 * math.log(0.2 / 0.3) + 0.6 * math.log(0.6 / 0.5),
    ]
    metrics = measure_text([got], [passage])
    assert metrics.text_kl == pytest.approx(sum(kl) / 3, rel=1e-5)
    assert metrics.top1_changes == pytest.approx(1 / 3)
    # The text is 0, 1, 0: probabilities 0.5, 0.8, 0.2 become 0.25, 0.8, 0.3.
    change = ((0.5 * 0.8 * 0.2) / (0.25 * 0.8 * 0.3)) ** (1 / 3) - 1
    assert metrics.perplexity_change == pytest.approx(change, rel=1e-5)
    assert (metrics.finite, metrics.rows) == (True, 3)


def test_a_gain_counts_as_no_change_and_the_same_as_nothing() -> None:
    passage, _ = by_hand()
    surer = np.array([log(0.9, 0.05, 0.05), log(0.05, 0.9, 0.05), log(0.9, 0.05, 0.05)], np.float32)
    assert measure_text([surer], [passage]).perplexity_change == 0.0
    same = measure_text([passage.logits], [passage])
    assert (same.text_kl, same.top1_changes, same.perplexity_change) == (0.0, 0.0, 0.0)
    assert not judge(same, limits_for("int8", same, TextMetrics.LIMITED))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_never_passes(bad: float) -> None:
    passage, got = by_hand()
    got[1, 2] = bad
    metrics = measure_text([passage.logits, got], [passage, passage])
    assert not metrics.finite and metrics.rows == 6
    for limits in (dict.fromkeys(TextMetrics.LIMITED, math.inf), {}):
        assert judge(metrics, limits)
    assert metrics.to_json()["text_kl"] is None  # JSON has no NaN
    with pytest.raises(ValueError, match="not finite"):
        limits_for("int8", metrics, TextMetrics.LIMITED)


def test_counted_shares_have_their_cap_and_kl_nine_times_what_rounding_does() -> None:
    gap = TextMetrics(1e-4, 1e-3, 1e-3, True, 100)
    limits = limits_for("int8", gap, TextMetrics.LIMITED)
    assert limits == {
        "text_kl": pytest.approx(9e-4),
        "top1_changes": 0.02,
        "perplexity_change": 0.01,
    }
    assert limits_for("int8", dataclasses.replace(gap, text_kl=1.0), TextMetrics.LIMITED)["text_kl"] == 0.005


def random_passages(seed: int, lengths: list[int], V: int) -> tuple[list[Passage], list[Array]]:
    random = np.random.default_rng(seed)
    passages, got = [], []
    for length in lengths:
        logits = 3 * random.standard_normal((length - 1, V)).astype(np.float32)
        tokens = tuple(int(token) for token in random.integers(0, V, length))
        passages.append(passage_of(tokens, logits))
        got.append(logits + 0.5 * random.standard_normal(logits.shape).astype(np.float32))
    return passages, got


shapes = {"seed": st.integers(0, 999), "lengths": st.lists(st.integers(2, 40), min_size=1, max_size=4)}


@settings(deadline=None, max_examples=40)
@given(**shapes, V=st.integers(2, 30))
def test_measures_are_torchs(seed: int, lengths: list[int], V: int) -> None:
    passages, got = random_passages(seed, lengths, V)
    metrics = measure_text(got, passages)
    every = (got, [p.logits for p in passages])
    own, want = (torch.from_numpy(np.concatenate(logits)).double() for logits in every)
    tokens = torch.tensor([token for p in passages for token in p.tokens[1:]])
    kl = torch.nn.functional.kl_div(
        own.log_softmax(-1), want.log_softmax(-1), reduction="batchmean", log_target=True
    )
    assert metrics.text_kl == pytest.approx(float(kl), rel=1e-4, abs=1e-7)
    assert metrics.top1_changes == pytest.approx((own.argmax(-1) != want.argmax(-1)).float().mean().item())
    lost = [torch.nn.functional.cross_entropy(logits, tokens).exp().item() for logits in (own, want)]
    assert metrics.perplexity_change == pytest.approx(max(0.0, lost[0] / lost[1] - 1), rel=1e-3, abs=1e-5)


@settings(deadline=None, max_examples=20)
@given(**shapes)
def test_golden_data_gives_the_same_verdict(
    tmp_path_factory: pytest.TempPathFactory, seed: int, lengths: list[int]
) -> None:
    passages, got = random_passages(seed, lengths, 20)
    path = tmp_path_factory.mktemp("golden") / "golden.npz"
    write_golden(path, to_arrays(passages), {"int8": {"text_kl": 0.1}})
    arrays, limits = read_golden(path)
    again = from_arrays(arrays)
    assert limits == {"int8": {"text_kl": 0.1}}
    assert [p.tokens for p in again] == [p.tokens for p in passages]
    full, thin = measure_text(got, passages), measure_text(got, again)
    # Of all positions, but for the distributions, of which some are kept.
    assert (thin.top1_changes, thin.rows) == (full.top1_changes, full.rows)
    assert thin.perplexity_change == pytest.approx(full.perplexity_change, rel=1e-6)
    kept = [np.isin(np.arange(len(p.logits)), a.rows) for p, a in zip(passages, again, strict=True)]
    assert all(rows.sum() == min(GOLDEN_ROWS, len(rows)) for rows in kept)
    some = [
        Passage(p.tokens, p.likeliest, p.logprobs, np.flatnonzero(rows), p.logits[rows])
        for p, rows in zip(passages, kept, strict=True)
    ]
    assert thin.text_kl == pytest.approx(measure_text(got, some).text_kl, rel=1e-6)
    for logits in got:
        logits[-1, 0] = np.nan
    assert judge(measure_text(got, again), {})


def test_passages_are_the_texts_in_order_cut_to_the_context() -> None:
    texts = [[1] * 300, [2] * 100, [3] * 369]
    whole = [token for text in texts for token in text]
    judged, rest = windows(texts, 1024, 50)
    assert [len(tokens) for tokens in (*judged, *rest)] == [PASSAGE_TOKENS] * 3  # the last, of one, is none
    assert [token for tokens in (*judged, *rest) for token in tokens] == whole[:768]
    judged, rest = windows(texts, 100, 50)
    assert [len(tokens) for tokens in (*judged, *rest)] == [100] * 7 + [69]
    assert len(judged) == 5  # three of five
    # 128 MiB of logits: 200,000 tokens of 4 bytes each make 167 rows, and one passage there always is.
    assert [len(tokens) for tokens in windows(texts, 1024, 200_000)[0]] == [PASSAGE_TOKENS]
    assert [len(tokens) for tokens in windows(texts, 64, 200_000)[0]] == [64, 64]


def test_a_text_of_one_passage_is_judged_and_calibrated_with() -> None:
    assert windows([[1, 2], [3]], 1024, 50) == ([(1, 2, 3)], [(1, 2, 3)])
    assert windows([[1]], 1024, 50) == ([], [])
