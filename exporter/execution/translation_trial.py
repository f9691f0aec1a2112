"""Runs a little real text through an encoder-decoder's graphs, node by node."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from ...runtime.backends.backend import Program
from ...runtime.backends.ort_backend import OrtCpuBackend
from ...runtime.bundle.bundle import Bundle
from ...runtime.bundle.manifest import Artifact
from ...runtime.decoding.decoder import pad
from ...runtime.diagnostics.golden.translation_engine import Engine
from ..reference.translation_samples import Expectation
from .translation_engine import open_engine
from .trial import Reading, Step, Trial, positions_of

if TYPE_CHECKING:
    from ...models import Transformer
    from ..reference.rounding import Rounding

TARGET_TOKENS = (12, 7)  # at most, of the two targets


def trial(
    bundle: Bundle,
    artifact: Artifact,
    expected: Expectation,
    whole: bool = False,
    opened: Callable[[Artifact], Program] | None = None,
) -> Trial:
    """Return a trial of two unequal, padded sources; for a decoder of their targets, then a token each."""
    sources = [sample.source for sample in expected.samples]
    targets = [
        sample.target[:-1] for sample in expected.samples
    ]  # with the start token no longer than a full one
    if not whole:
        sources = sources[:2]
        targets = [target[:most] for target, most in zip(targets, TARGET_TOKENS, strict=False)]
    defaults = bundle.manifest.generation
    assert defaults is not None and defaults.decoder_start is not None
    start = defaults.decoder_start
    prompts = [[start, *target[:-1]] for target in targets]

    def engine(program: Program) -> Engine:
        def open_other(other: Artifact) -> Program:
            return OrtCpuBackend().open(bundle, other) if opened is None else opened(other)

        return open_engine(bundle, artifact, lambda a: program if a == artifact else open_other(a))

    def encode(program: Program) -> None:
        engine(program).encoder.encode(sources)

    def decode(program: Program) -> None:
        run = engine(program).decoding(sources, 1, max(map(len, targets)) + 1)
        run.prefill(prompts)
        run.decode([target[-1] for target in targets])

    def reading(row: int) -> Reading:
        def read(model: Transformer, rounding: Rounding | None) -> object:
            del rounding  # no keys and values of a translator are int8
            from ..reference.translation import reference_of

            reference = reference_of(model, start)
            if artifact.graph == "encoder":
                return reference.keys_values(sources[row])
            # The model is fed a target but for its last token, so there has to be one more.
            return reference.results(sources[row], [*targets[row], 0])

        return read

    rows = tuple(reading(row) for row in range(len(sources)))
    if artifact.graph == "encoder":
        return Trial(encode, (Step("sources", positions_of(pad(sources, "right")[1])),), rows)
    prefill = positions_of(pad(prompts, artifact.padding_side)[1])
    last = np.array([[len(prompt)] for prompt in prompts])
    return Trial(decode, (Step("prefill", prefill), Step("decode", last)), rows)
