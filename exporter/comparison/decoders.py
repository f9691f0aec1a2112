"""Runs a decoder's cases through the runtime's own loop and compares every answer with PyTorch's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ...runtime.apps.check import cases
from ...runtime.apps.check.case import Case, CaseSet, Row, Text, to_arrays
from ...runtime.apps.check.decoder import list_decoder_comparisons, run
from ...runtime.apps.check.divergence import list_samples
from ...runtime.apps.check.draws import PREFIX
from ...runtime.apps.check.files import Arrays
from ...runtime.apps.check.metrics import DrawMetrics, Metrics, Spot, TextMetrics
from ...runtime.backends.backend import Program
from ...runtime.bundle.manifest import Artifact
from ...runtime.decoding.decoder import Decoder
from ..execution.replay import Replay, cut_case, make_replay
from ..limits import Gaps
from ..tasks import decoder_answers
from ..tasks.decoder import CONTEXT, GRAPH, LOGITS
from ..tasks.passages import open_plain_tokenizer
from .examiner import Examiner, Limited, Limits, OpenProgram

if TYPE_CHECKING:
    from ..reference.model import ReferenceModel
    from ..reference.rounding import Rounding

WHOLE_TEXTS = 3  # passages of a whole replay
REPLAY_TOKENS = (24, 13)  # at most, of the two texts of a short one


@dataclass(frozen=True)
class DecoderExaminer(Examiner[Decoder]):
    """A decoder's graphs beside the logits that the model computes."""

    def collect_golden(self) -> Arrays:
        return to_arrays(decoder_answers.thin_for_file(self.expected))

    def measure_gaps(self, model: ReferenceModel, rounding: Rounding) -> Gaps:
        return decoder_answers.measure_gaps(model, self.bundle, self.expected, rounding)

    def thin(self, texts: int) -> DecoderExaminer:
        return replace(self, expected=decoder_answers.thin(self.expected, texts))

    def run_calibration_texts(self, model: ReferenceModel) -> None:
        from ..reference.open import make_reference

        for text in self.expected.calibration:
            make_reference(model).compute_logits(text.tokens, slice(None))

    def list_limited(self, gaps: Gaps) -> Iterator[Limited]:
        yield "", gaps.get(""), Metrics.LIMITED
        yield "", gaps.get("text"), TextMetrics.LIMITED
        yield PREFIX, gaps.get(PREFIX), DrawMetrics.LIMITED

    def open(self, artifact: Artifact, open_program: OpenProgram) -> Decoder:
        return Decoder(open_program(artifact), artifact)

    def list_cases(self, engine: Decoder, artifact: Artifact, limits: Limits) -> dict[str, cases.Case]:
        return list_decoder_comparisons(engine, self.expected, limits, open_plain_tokenizer(self.bundle))

    def list_slow_cases(self, engine: Decoder, artifact: Artifact, limits: Limits) -> dict[str, cases.Case]:
        text, known = next(iter(self.expected.answers["logits"].items()))
        length = int(known.positions[-1]) + 1
        every = Case(
            "prefill of every position", GRAPH, (Row(text, (length,)),), (LOGITS,), "every", chunk=length
        )
        context = tuple(case for case in self.expected.cases if case.name == CONTEXT)
        few = replace(self.expected, cases=(every, *context))
        return list_decoder_comparisons(engine, few, limits, open_plain_tokenizer(self.bundle))

    def make_replay(self, artifact: Artifact, whole: bool = False) -> Replay:
        """Return the replay of two texts of unequal length as a padded batch, then a token for each."""
        texts = self.choose_replay_texts(whole)
        rows = tuple(Row(number, (len(text) - 1, len(text))) for number, text in enumerate(texts))
        case = Case("short texts", GRAPH, rows, ())
        case_set = replace(self.expected, texts=tuple(map(Text, texts)), answers={})
        return make_replay(artifact, case_set, case, DecoderReplay(artifact))

    def make_spot_replay(self, artifact: Artifact, spot: Spot) -> Replay | None:
        number, step, row = spot
        case = cut_case(self.expected.cases[number], step)
        return make_replay(artifact, self.expected, case, DecoderReplay(artifact), row)

    def choose_replay_texts(self, whole: bool) -> list[tuple[int, ...]]:
        """Return the tokens of a replay's texts."""
        texts = self.expected.texts
        passages = self.expected.list_texts("passages")
        if whole and passages:
            return [texts[number].tokens for number in passages[:WHOLE_TEXTS]]
        longest_first = sorted(list_samples(self.expected), key=lambda sample: -len(sample.prompt))
        return [
            (*sample.prompt, *sample.continuation)[: length + 1]
            for sample, length in zip((longest_first[0], longest_first[-1]), REPLAY_TOKENS, strict=True)
        ]


@dataclass(frozen=True)
class DecoderReplay:
    """How a decoder's cases are replayed."""

    artifact: Artifact

    def drive(self, program: Program, case_set: CaseSet, case: Case) -> None:
        for _ in run(Decoder(program, self.artifact), case_set, 0, case):
            pass

    def read(self, case_set: CaseSet, row: Row, model: ReferenceModel, rounding: Rounding | None) -> object:
        """Run PyTorch over what a row reads; last over what follows that which is there more than once."""
        from ..reference.open import make_reference

        reference = make_reference(model, rounding)
        return decoder_answers.read_to(reference, case_set.texts[row.text], row.ends[-1])
