"""Faults where nobody looked: at some positions, in some sizes of batches, in some rows."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from planforge.exporter import export
from planforge.exporter.levels import FULL, STANDARD
from planforge.exporter.tasks import decoder, random_cases
from planforge.exporter.verification.golden_answers import answer_again, compare_arrays
from planforge.runtime.apps.check.case import list_widths
from planforge.runtime.apps.check.selftest import selftest

from ...helpers.fault_table import Row, collect_table
from ...helpers.faults import Fault, Plant
from ...helpers.ground import Ground
from ...helpers.models import tiny_bert, write_wordpiece
from ...helpers.rare_faults import (
    exchanged_sources,
    late_positions_behind,
    late_slot,
    late_total,
    late_total_at,
    positions_of_four,
    unmasked,
)

LATE = "a cache one slot late, in single steps at positions 100 to 199 alone"
FOUR = "positions wrong in batches of 4 alone"
SIX = "positions wrong in single steps of batches of 6 alone, behind 60 tokens or more"
FEW = "positions wrong in steps of 2 to 6 tokens alone, behind 150 tokens or more"
FOURTH = "padding of the fourth row unmasked"
LATE_IN_FEW = late_positions_behind(150, None, range(2, 7))
STEPS = "single steps at positions 1 to 255"
BATCHES = "random batches, padded, seed 0"


@pytest.fixture(scope="module")
def table() -> Iterator[list[Row]]:
    """Each of these faults was missed before batches were drawn."""
    with collect_table("drawn-faults", ("graph", "fault", "caught by", "node named")) as rows:
        yield rows


@pytest.fixture(scope="module")
def ground(demo_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Ground:
    return Ground(demo_bundle, tmp_path_factory.mktemp("damaged") / "copy")


@pytest.mark.parametrize(
    ("artifact", "name", "plant", "case", "module", "op_types"),
    [
        ("decoder.inplace.fp32", LATE, late_slot, STEPS, "h.0.attn", {"TensorScatter", "Attention"}),
        ("decoder.ort.fp32", LATE, late_total, STEPS, "h.0.attn", {"GroupQueryAttention"}),
        ("decoder.portable.fp32", FOUR, positions_of_four, BATCHES, "wpe", {"Gather"}),
        ("decoder.inplace.fp16", FOUR, positions_of_four, BATCHES, "wpe", {"Gather"}),
        ("decoder.portable.fp32", SIX, late_positions_behind(60, 6, range(1, 2)), BATCHES, "wpe", {"Gather"}),
        ("decoder.portable.fp32", FEW, LATE_IN_FEW, BATCHES, "wpe", {"Gather"}),
        ("decoder.portable.fp32", FOURTH, unmasked(0, 3, 3), BATCHES, "", {"Unsqueeze", "And", "Where"}),
    ],
)
def test_a_fault_that_few_texts_show_is_caught_and_named(
    ground: Ground,
    table: list[Row],
    artifact: str,
    name: str,
    plant: Plant,
    case: str,
    module: str,
    op_types: set[str],
) -> None:
    with ground.damaged(artifact, Fault("rare", plant, "", ())) as bundle:
        failed, mismatch = ground.examined(bundle, bundle.manifest.artifact(artifact))
    assert case in {comparison.case for comparison in failed}
    assert mismatch is not None
    assert mismatch.module == module and mismatch.op_type in op_types
    table.append((f"GPT-2 {artifact}", name, case, f"{mismatch.op_type} of {module or 'no module'}"))


@pytest.fixture(scope="module")
def large(demo_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Ground:
    """As many weights as Qwen2-0.5B has: 64 tokens are drawn, of a context of 256."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoder, "count_weights", lambda model: 500_000_000)
        return Ground(demo_bundle, tmp_path_factory.mktemp("large") / "copy", STANDARD)


def test_a_model_whose_budget_allows_few_positions_is_held_to_all_of_the_context(
    large: Ground, table: list[Row]
) -> None:
    expected = large.verifier.expected
    assert max(len(expected.texts[number].tokens) for number in expected.list_texts("columns")) == 64
    artifact = "decoder.inplace.fp32"
    with large.damaged(artifact, Fault("rare", late_slot, "", ())) as bundle:
        failed, mismatch = large.examined(bundle, bundle.manifest.artifact(artifact))
    assert BATCHES in {comparison.case for comparison in failed}
    assert mismatch is not None
    assert mismatch.module == "h.0.attn" and mismatch.op_type in {"TensorScatter", "Attention"}
    table.append((f"GPT-2 {artifact}, as of 0.5B", LATE, BATCHES, f"{mismatch.op_type} of h.0.attn"))


def test_golden_answers_behind_repeated_pasts_are_asked_again(large: Ground) -> None:
    """A damaged one is told; so is one that is gone, and a past that the context has no room for."""
    arrays = large.verifier.collect_golden()
    expected = large.verifier.expected
    number = next(n for n in expected.list_texts("columns") if expected.texts[n].repeats > 1)
    name = f"columns.{number}.values"
    asked_otherwise = large.verifier.thin(1)

    def list_faults(changed: Mapping[str, Any]) -> list[str]:
        golden = {key: array for key, array in {**arrays, **changed}.items() if array is not None}
        meant = answer_again(asked_otherwise, golden, large.model)
        return list(compare_arrays(golden, meant, 1e-3))

    assert list_faults({}) == []
    (fault,) = list_faults({name: arrays[name] + 1})
    assert fault.startswith(f"{name} is ")
    with pytest.raises(KeyError, match=name):
        list_faults({name: None})
    plan = json.loads(str(arrays["plan"]))
    plan["texts"][number]["repeats"] = 10**6
    with pytest.raises(ValueError, match=r"it has texts of \d+ tokens, and the model takes 256"):
        list_faults({"plan": np.array(json.dumps(plan))})


@pytest.mark.parametrize(("repeats", "context"), [(1, 256), (4, 1024), (22, 1024), (683, 32768)])
def test_pasts_of_every_size_of_batch_are_in_all_quarters_of_the_context(repeats: int, context: int) -> None:
    quarters: dict[int, set[int]] = {}
    residues = set()
    weights = int(FULL.random_work / 512)  # of a model that reads texts of 256 tokens
    for seed in range(40):
        drawing = random_cases.RandomCases(weights, (1,), context, 8, seed, parts=2, level=FULL)
        random = np.random.default_rng(seed)
        # In place of a text's number a row has here how often its past is there.
        for rows in random_cases.sample_far_batches(random, drawing, repeats, lambda past, times: times):
            size = len(rows)
            pasts = [row.ends[0] * row.text for row in rows]
            if size > 1 and rows[0].text >= repeats:
                reached = max(drawing.context, drawing.level.cached) // size
                assert max(pasts) > 0.75 * min(context, reached)  # one row, every time
            first, *others = list_widths(rows)
            assert first * rows[0].text + sum(others) <= context
            quarters.setdefault(size, set()).update(4 * past // context for past in pasts)
            residues |= {past % repeats for past in pasts}
    most = {size: min(context, max(context, FULL.cached) // size) for size in quarters}
    assert all(found >= set(range(4 * most[size] // context)) for size, found in quarters.items())
    assert len(residues) > repeats // 2


@pytest.fixture(scope="module")
def encoders(tmp_path_factory: pytest.TempPathFactory) -> Ground:
    """A tiny BERT that takes more tokens than 100."""
    folder = tmp_path_factory.mktemp("long")
    tiny_bert(folder / "bert", "BertForTokenClassification", num_hidden_layers=1, max_position_embeddings=160)
    write_wordpiece(folder / "bert")
    export(folder / "bert", folder / "bundle", target=["portable"], precision=["fp32"])
    return Ground(folder / "bundle", folder / "copy")


@pytest.mark.parametrize(
    ("name", "plant"),
    [("padding unmasked behind token 100", unmasked(1, 100, 1000)), (FOURTH, unmasked(0, 3, 3))],
)
def test_padding_of_an_encoder_that_few_batches_have_is_caught_and_named(
    encoders: Ground, table: list[Row], name: str, plant: Plant
) -> None:
    artifact = "encoder.portable.fp32"
    with encoders.damaged(artifact, Fault("padding", plant, "", ())) as bundle:
        failed, mismatch = encoders.examined(bundle, bundle.manifest.artifact(artifact))
    assert BATCHES in {comparison.case for comparison in failed}
    assert mismatch is not None
    assert mismatch.module == "" and mismatch.op_type in {"Unsqueeze", "Where", "Or"}
    table.append((f"BERT {artifact}", name, BATCHES, f"{mismatch.op_type} of no module"))


@pytest.fixture(scope="module")
def translators(dates_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Ground:
    return Ground(dates_bundle, tmp_path_factory.mktemp("translators") / "copy", STANDARD)


def test_golden_data_shows_a_fault_of_few_translations(translators: Ground) -> None:
    """Without PyTorch, by `selftest`."""
    late = Fault("rare", late_total_at("decoder.layers.0.attention", 40, 50), "", ())
    with translators.damaged("decoder.ort.fp32", late) as bundle:
        failed = [
            comparison.case for comparison in selftest(bundle.folder).comparisons if comparison.failures
        ]
    assert failed == [BATCHES, "single steps at positions 1 to 63"]


SOURCE_MASK = "encoder_attention_mask"
SEEN = "source padding from column 24 on is seen"
MASK_NODES = {"Unsqueeze", "Or", "Where"}


@pytest.mark.parametrize(
    ("artifact", "name", "plant", "case", "module", "op_types"),
    [
        (
            "decoder.portable.fp32",
            f"{SEEN} by cross-attention",
            unmasked(1, 24, 1000, SOURCE_MASK),
            BATCHES,
            "",
            MASK_NODES,
        ),
        (
            "encoder.portable.fp32",
            f"{SEEN} by the encoder",
            unmasked(1, 24, 1000),
            BATCHES,
            "",
            MASK_NODES,
        ),
        (
            "decoder.portable.fp32",
            "two rows' sources exchanged in batches of 6 alone",
            exchanged_sources(6),
            BATCHES,
            "decoder.layers.0.cross_attention_residual",
            {"MatMul"},
        ),
        (
            "decoder.ort.fp32",
            "a cache one slot late, in single steps at positions 40 to 50 alone",
            late_total_at("decoder.layers.0.attention", 40, 50),
            "single steps at positions 1 to 63",
            "decoder.layers.0.attention",
            {"GroupQueryAttention"},
        ),
    ],
)
def test_a_fault_of_few_translations_is_caught_and_named(
    translators: Ground,
    table: list[Row],
    artifact: str,
    name: str,
    plant: Plant,
    case: str,
    module: str,
    op_types: set[str],
) -> None:
    with translators.damaged(artifact, Fault("rare", plant, "", ())) as bundle:
        failed, mismatch = translators.examined(bundle, bundle.manifest.artifact(artifact))
    assert case in {comparison.case for comparison in failed}
    assert all("random." in failure or "random" in c.case for c in failed for failure in c.failures)
    assert mismatch is not None
    assert mismatch.module == module and mismatch.op_type in op_types
    table.append((f"Transformer {artifact}", name, case, f"{mismatch.op_type} of {module or 'no module'}"))
