"""Faults where nobody looked: at some positions, in some sizes of batches, in some rows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from planforge.exporter import export

from ...helpers.fault_table import Row, collect_table
from ...helpers.faults import Fault, Plant
from ...helpers.ground import Ground
from ...helpers.models import tiny_bert, write_wordpiece
from ...helpers.rare_faults import late_slot, late_total, positions_of_four, unmasked

LATE = "a cache one slot late, in single steps at positions 100 to 199 alone"
FOUR = "positions wrong in batches of 4 alone"
FOURTH = "padding of the fourth row unmasked"
STEPS = "single steps at positions 1 to 255, 1 row"
BATCHES = "batches of 1 to 8 rows, padded, drawn with seed 0"


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
        failed, culprit = ground.examined(bundle, bundle.manifest.artifact(artifact))
    assert case in {comparison.case for comparison in failed}
    assert culprit is not None
    assert culprit.module == module and culprit.op_type in op_types
    table.append((f"GPT-2 {artifact}", name, case, f"{culprit.op_type} of {module or 'no module'}"))


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
        failed, culprit = encoders.examined(bundle, bundle.manifest.artifact(artifact))
    drawn = "batches of 2 to 8, 16 and 32 rows, padded, drawn"
    case = next(comparison.case for comparison in failed if comparison.case.startswith(drawn))
    assert culprit is not None
    assert culprit.module == "" and culprit.op_type in {"Unsqueeze", "Where", "Or"}
    table.append((f"BERT {artifact}", name, case, f"{culprit.op_type} of no module"))
