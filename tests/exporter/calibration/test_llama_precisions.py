"""int8, int4 and int8 caches of the Llama family: grouped heads, rotations, windows and caps.

B batch, T tokens, K heads of keys and values, D head size
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import transformers
from torch import Tensor, nn

from planforge.exporter import export, exporting
from planforge.exporter.calibration.calibration import Calibration, calibrate
from planforge.exporter.checkpoints.source import DEMOS
from planforge.exporter.tasks.pytorch_decoder import open_reference
from planforge.models import Llama, load_model
from planforge.runtime.backends.ort_backend import OrtCpuBackend
from planforge.runtime.backends.ort_program import OrtBuffer
from planforge.runtime.bundle.bundle import Bundle
from planforge.runtime.decoding.decoder import Decoder, DecoderRun, pad
from planforge.runtime.decoding.static_cache import GroupQueryCache

from ...helpers.cache import RoundingCache, in_steps

Array = npt.NDArray[np.float32]
# Windows, biases, and rotations inside and outside of attention.
KINDS = ("gemma 2", "phi-4-mini", "llama with biases")
PRECISIONS = ["fp32-kv8", "int8", "int4", "int8-kv8"]
TEXTS = (DEMOS / "gpt2-demo/prompts.txt").read_text(encoding="utf-8").splitlines()[:4]  # to calibrate with
ROWS = ([*range(100, 130)], [*range(900, 913)])  # longer than two windows


@dataclass(frozen=True)
class Exported:
    checkpoint: Path
    bundle: Bundle
    calibration: Calibration

    @functools.cached_property
    def published(self) -> Any:
        """The checkpoint in transformers."""
        return transformers.AutoModelForCausalLM.from_pretrained(self.checkpoint, dtype=torch.float32)

    @contextlib.contextmanager
    def start(self, precision: str) -> Iterator[DecoderRun]:
        artifact = self.bundle.manifest.artifact(f"decoder.ort.{precision}")
        decoder = Decoder(OrtCpuBackend(1).open(self.bundle, artifact), artifact)
        yield decoder.start(len(ROWS), 64)
        decoder.close()


@pytest.fixture(scope="module", params=KINDS)
def exported(
    request: pytest.FixtureRequest,
    llama_bundle: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Exported:
    found: list[Calibration] = []

    def watched(*arguments: Any) -> Calibration:
        found.append(calibrate(*arguments))
        return found[0]

    checkpoint = llama_bundle(request.param) / "checkpoint"
    folder = tmp_path_factory.mktemp("precisions")
    prompts = folder / "prompts.txt"
    prompts.write_text("".join(f"{text}\n" for text in TEXTS), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exporting, "calibrate", watched)
        options: dict[str, Any] = {"precision": PRECISIONS, "prompts": prompts, "verify": False}
        export(checkpoint, folder / "bundle", target=["cpu"], **options)
    return Exported(checkpoint, Bundle.open(folder / "bundle"), found[0])


def read_in_steps(run: DecoderRun) -> list[Array]:
    """The logits behind each row, prefilled in chunks, and behind a token more for each."""
    prompts = [row[:-1] for row in ROWS]
    return [run.prefill(prompts, 8), run.decode([row[-1] for row in ROWS])]


def test_int8_slots_are_the_rounded_keys_and_values(exported: Exported) -> None:
    with exported.start("fp32-kv8") as run:
        read_in_steps(run)
        assert isinstance(run.cache, GroupQueryCache)
        for b, row in enumerate(ROWS):
            steps = in_steps(exported.published, row, exported.calibration.cache_scales)
            for name, exact in steps.items():
                buffer = run.cache.buffers[name]
                assert isinstance(buffer, OrtBuffer) and buffer.array.dtype == np.int8
                got = buffer.array[b, :, : len(row)].astype(np.float32)
                want = np.clip(np.rint(exact), -128, 127)
                assert got.shape[0] == 2 and len(np.unique(want)) > 60  # of two heads, for four of queries
                # Rounding in one layer that falls the other way moves those behind it by a part of a step.
                near = np.abs(exact - np.floor(exact) - 0.5) < (1e-3 if name.startswith("cache.0.") else 0.05)
                np.testing.assert_array_equal(got[~near], want[~near])
                assert np.abs(got - want).max() <= 1


def test_an_int8_cache_is_read_as_it_was_rounded(exported: Exported) -> None:
    scales = exported.calibration.cache_scales
    with exported.start("fp32-kv8") as run:
        for behind, found in zip((-2, -1), read_in_steps(run), strict=True):
            for row, logits in zip(ROWS, found, strict=True):
                with torch.inference_mode():
                    cache = RoundingCache(scales)
                    out = exported.published(torch.tensor([row]), past_key_values=cache, use_cache=True)
                # A number between two steps may become either.
                np.testing.assert_allclose(logits, out.logits[0, behind].numpy(), rtol=0, atol=0.02)


@pytest.mark.parametrize("precision", ["int8", "int4", "int8-kv8"])
def test_quantized_weights_and_rows_are_those_of_pytorch(exported: Exported, precision: str) -> None:
    """Products read rows that are rounded to int8 in blocks as wide as the weights'."""
    model = load_model(exported.checkpoint)
    assert isinstance(model, Llama)
    rounding = exported.calibration.make_rounding(precision)
    assert rounding is not None
    artifact = exported.bundle.manifest.artifact(f"decoder.ort.{precision}")
    reference = open_reference(model, rounding)
    with rounding.apply(model), rounded_rows(model, artifact.quantization["block_size"]):
        want = np.concatenate([reference.compute_logits(row, slice(None)) for row in ROWS])
    exact = np.concatenate([open_reference(model).compute_logits(row, slice(None)) for row in ROWS])
    with exported.start(precision) as run:
        ids, valid = pad(ROWS, "right")
        found = run.step(ids, valid, np.flatnonzero(valid).tolist())
    lost = np.abs(exact - want).mean()
    off = np.abs(found - want).mean(axis=1)
    # A number between two steps may become either, which few rows have seen.
    assert np.median(off) < 0.02 * lost and off.max() < lost


@contextlib.contextmanager
def rounded_rows(model: nn.Module, size: int) -> Iterator[None]:
    """Round what every linear reads to int8, in blocks."""

    def round_rows(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor]:
        (x,) = inputs
        blocks = x.view(*x.shape[:-1], -1, size)
        step = blocks.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 127
        return ((blocks / step).round().mul(step).view(x.shape),)

    hooks = [m.register_forward_pre_hook(round_rows) for m in model.modules() if isinstance(m, nn.Linear)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
