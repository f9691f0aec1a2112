"""Runs a decoder through the runtime's own loop and compares every logit with PyTorch's.

V vocabulary
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ...runtime.backends.backend import Program
from ...runtime.backends.ort_backend import OrtCpuBackend
from ...runtime.bundle.bundle import Bundle
from ...runtime.bundle.manifest import Artifact
from ...runtime.decoding.decoder import Decoder, pad
from ...runtime.diagnostics.golden.cases import Case
from ...runtime.diagnostics.golden.decoders import cases, full_context
from ...runtime.diagnostics.metrics import Comparison, Logits, Outcome, judged, measure
from ...runtime.text.tokenizer import Tokenizer
from ..execution.node_executor import ExecutedProgram, NotFiniteError, rounded_engine
from ..execution.trial import Reading, Step, Trial, positions_of
from ..gate import COUNTED
from ..passes.weight_files import load_graph
from ..precisions import PRECISIONS
from ..reference.decoder_samples import Expectation, expect, from_arrays, gaps, limits, run_texts, to_arrays
from ..reference.passages import measure_text, read_passages

if TYPE_CHECKING:
    from ...models import GPT2
    from ..reference.rounding import Rounding

log = logging.getLogger("planforge")

WHOLE_TEXTS = 3  # passages of a whole trial
TRIAL_TOKENS = (24, 13)  # at most, of the two texts of a trial
ENOUGH = 500  # tokens of real text; what is counted in fewer says no more of an engine than of the text


def compare(
    bundle: Bundle,
    artifact: Artifact,
    expected: Expectation,
    limits: Mapping[str, float],
    progress: Callable[[str], None] = lambda _: None,
) -> list[Comparison]:
    """Compare every case of one artifact on ONNX Runtime; fp16 also node by node.

    Returns:
        A comparison per case, passed or not.
    """
    backend = OrtCpuBackend()  # verify() hashed every file, export() has just written them
    tokenizer = Tokenizer.from_file(bundle.path(str(bundle.manifest.tokenizer["files"][0])))
    decoder = Decoder(backend.open(bundle, artifact), artifact)
    comparisons = []
    try:
        compared = cases(decoder, expected, limits, tokenizer)
        if expected.passages and "text_kl" in limits:
            compared["real text, every token"] = real_text_case(decoder, expected, limits)
        for case, run in compared.items():
            progress(f"verifying {artifact.id}: {case}")
            comparisons.append(
                Comparison(artifact=artifact.id, backend=backend.name, case=case, **vars(run()))
            )
    finally:
        decoder.close()
    if artifact.precision == "fp16":
        engine = rounded_engine(artifact.precision)
        for case, run in rounded_cases(bundle, artifact, expected, limits).items():
            progress(f"verifying {artifact.id}: {case}, {engine}")
            comparisons.append(Comparison(artifact=artifact.id, backend=engine, case=case, **vars(run())))
    return comparisons


def real_text_case(decoder: Decoder, expected: Expectation, limits: Mapping[str, float]) -> Case:
    """Return the case that compares every token of the passages."""

    def run() -> Outcome:
        got = read_passages(decoder, expected.passages)
        found = measure_text(got, expected.passages)
        few = [name for name in found.LIMITED if name not in COUNTED] if found.rows < ENOUGH else None
        if few is not None and PRECISIONS[decoder.artifact.precision].is_quantized:
            log.warning(
                "%s: %s are shown and not judged, for that takes %d tokens of real text, and there are %d",
                decoder.artifact.id,
                " and ".join(COUNTED),
                ENOUGH,
                found.rows,
            )
        return judged(found, limits, names=few)

    return run


def rounded_cases(
    bundle: Bundle, artifact: Artifact, expected: Expectation, limits: Mapping[str, float]
) -> dict[str, Case]:
    """Return the cases for `NodeExecutor`, which does what an engine that computes in fp16 would do."""
    graph = load_graph(bundle.path(artifact.file))
    sample = expected.samples[0]

    def every_position(decoder: Decoder) -> Logits:
        ids = np.array([[*sample.prompt, *sample.continuation[:-1]]])
        rows = [len(sample.prompt) - 1 + step for step in sample.steps]
        return decoder.start(1, ids.size).step(ids, np.ones_like(ids, bool), rows)

    def case(run: Callable[[Decoder], Logits], want: Logits) -> Case:
        def outcome() -> Outcome:
            try:
                got = run(Decoder(ExecutedProgram(graph, artifact), artifact))
            except NotFiniteError as error:
                return judged(measure(np.full_like(want, np.nan), want), limits, failures=[str(error)])
            return judged(measure(got, want), limits)

        return outcome

    return {
        "prefill of every position": case(every_position, sample.logits),
        "full context": case(lambda decoder: full_context(decoder, expected)[0], expected.context_logits),
    }


def trial(
    bundle: Bundle,
    artifact: Artifact,
    expected: Expectation,
    whole: bool = False,
    opened: Callable[[Artifact], Program] | None = None,
) -> Trial:
    """Return a trial of two texts of unequal length as a padded batch, then a token for each on top."""
    del bundle, opened
    if whole and expected.passages:
        texts = [list(passage.tokens) for passage in expected.passages[:WHOLE_TEXTS]]
    else:
        longest_first = sorted(expected.samples, key=lambda s: -len(s.prompt))
        texts = [
            [*sample.prompt, *sample.continuation][: most + 1]
            for sample, most in zip((longest_first[0], longest_first[-1]), TRIAL_TOKENS, strict=True)
        ]
    prompts = [text[:-1] for text in texts]
    last = [text[-1] for text in texts]
    prefill = positions_of(pad(prompts, artifact.padding_side)[1])
    decode = np.array([[len(prompt)] for prompt in prompts])

    def drive(program: Program) -> None:
        run = Decoder(program, artifact).start(len(texts), max(map(len, texts)))
        run.prefill(prompts)
        run.decode(last)

    def reading(text: Sequence[int]) -> Reading:
        def read(model: GPT2, rounding: Rounding | None) -> object:
            from ..reference.decoder import reference_of

            return reference_of(model, rounding).logits(text, slice(None))

        return read

    steps = (Step("prefill", prefill), Step("decode", decode))
    return Trial(drive, steps, tuple(reading(text) for text in texts))


# An Examiner:
__all__ = ["compare", "expect", "from_arrays", "gaps", "limits", "run_texts", "to_arrays", "trial"]
