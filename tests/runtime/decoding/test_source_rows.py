"""Several tokens of several rows on top of a past, where each sees a source; transformers is the judge."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from planforge.runtime.backends.ort_backend import OrtCpuBackend
from planforge.runtime.bundle.bundle import Bundle
from planforge.runtime.decoding.decoder import Decoder
from planforge.runtime.translate.source_encoder import SourceEncoder

from ...helpers.translation import SENTENCES, Reference

TARGETS = [[5, 9, 4, 8, 7, 6, 3], [11, 3], [8, 8, 2, 1, 5]]


@pytest.mark.parametrize("beams", [1, 2])
def test_each_row_reads_its_own_source(beams: int, marian_bundle: Path) -> None:
    bundle = Bundle.open(marian_bundle)
    encoder, decoder = (bundle.manifest.artifact(f"{name}.ort.fp32") for name in ("encoder", "decoder"))
    backend = OrtCpuBackend()
    reader = SourceEncoder(backend.open(bundle, encoder), encoder, decoder)
    reference = Reference.of(marian_bundle.parent / "marian")
    sources = [reference.tokenizer(text).input_ids for text in SENTENCES[:3]]
    start = reference.model.config.decoder_start_token_id
    prompts = [[start, *target] for target in TARGETS for _ in range(beams)]
    run = Decoder(backend.open(bundle, decoder), decoder).start(len(prompts), 16, reader.prepare(sources))
    found = run.prefill(prompts, chunk=3)
    for row, prompt in enumerate(prompts):
        with torch.inference_mode():
            expected = reference.model(
                input_ids=torch.tensor([sources[row // beams]]), decoder_input_ids=torch.tensor([prompt])
            ).logits[0, -1]
        np.testing.assert_allclose(found[row], expected, atol=2e-4)
