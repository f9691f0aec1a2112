"""The choice of a quantizer: from `export`'s argument to the numbers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from planforge.exporter import export, export_checkpoint, import_folder, pipeline
from planforge.exporter.passes.int8_rows import TOP, choose_product
from planforge.exporter.request import Request

from ...helpers.graphs import normal


class ReachedError(Exception):
    """Ends an export at the place that a test looks at, with what was found there."""


def reach(*found: Any) -> None:
    """Raise what a function is called with."""
    raise ReachedError(*found)


def test_export_and_import_take_a_quantizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export_checkpoint, "write_bundle", reach)
    monkeypatch.setattr(import_folder, "import_graphs", reach)
    choices: tuple[dict[str, Any], ...] = ({}, {"quantizer": "gptq"}, {"quantizer": "rtn"})
    for options in choices:
        expected = options.get("quantizer", "gptq")
        with pytest.raises(ReachedError) as exported:
            export("gpt2-demo", tmp_path / "B", precision=["int4"], **options)
        assert exported.value.args[1].quantizer == expected
        with pytest.raises(ReachedError) as imported:
            import_folder.import_folder(tmp_path, tmp_path / "B", precision=["int4"], **options)
        assert imported.value.args[2].quantizer == expected


def test_the_calibration_gets_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    provider: Any = SimpleNamespace(
        checkpoint=None,
        load_reference=lambda progress: "model",
        make_graphs=lambda recipes, progress, compute: ({}, "examiner"),
    )
    monkeypatch.setattr(pipeline, "begin_manifest", lambda *arguments: None)
    monkeypatch.setattr(pipeline, "calibrate", reach)
    request = Request(output=tmp_path, targets=("cpu",), precisions=("int4",), quantizer="rtn")
    with pytest.raises(ReachedError) as found:
        pipeline.stage_bundle(provider, request, [], [], tmp_path, print)
    assert found.value.args[-1] == "rtn"


def test_an_encoder_s_weights_are_rounded_to_the_nearest_too() -> None:
    x = normal(100, 32, seed=1)
    weight = normal(32, 6, seed=2)
    nearest = choose_product(x, weight, gptq=False)
    scaled = weight if nearest.smoothing is None else weight * nearest.smoothing[:, None]
    np.testing.assert_array_equal(nearest.weight, np.clip(np.rint(scaled / nearest.scale), -TOP, TOP))
    close = choose_product(x, weight)
    assert (close.rule, close.error) == (nearest.rule, nearest.error)
    assert (close.weight != nearest.weight).any()
