"""Runs an encoder's cases through the runtime's own batching and compares every output with PyTorch's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from ...runtime.apps.check import cases
from ...runtime.apps.check.case import Case, CaseSet, Known, Row, to_arrays
from ...runtime.apps.check.encoder import list_encoder_comparisons, make_measure, make_piece, run
from ...runtime.apps.check.files import Arrays
from ...runtime.apps.check.metrics import Spot
from ...runtime.backends.backend import Program
from ...runtime.backends.ort_backend import OrtCpuBackend
from ...runtime.bundle.bundle import Bundle
from ...runtime.bundle.manifest import Artifact
from ...runtime.encode.encoder import Encoder
from ..execution.replay import Replay, make_replay
from ..limits import Gaps
from ..reference.fitted_head import HEAD, LinearHead
from ..tasks import encoder_answers
from ..tasks.encoder import RANDOM, make_case, read_problem_type
from .examiner import Examiner, Limited, Limits, OpenProgram

if TYPE_CHECKING:
    from ..reference.model import ReferenceModel
    from ..reference.rounding import Rounding


@dataclass(frozen=True)
class EncoderExaminer(Examiner[Encoder]):
    """An encoder's graphs beside every output that the model computes."""

    def collect_golden(self) -> Arrays:
        return to_arrays(encoder_answers.thin_for_file(self.expected))

    @property
    def padding(self) -> int:
        """The token that pads short texts of a batch."""
        assert self.bundle.manifest.encoder is not None
        return self.bundle.manifest.encoder.padding

    def measure_gaps(self, model: ReferenceModel, rounding: Rounding) -> Gaps:
        return encoder_answers.measure_gaps(model, self.bundle, self.expected, rounding)

    def run_calibration_texts(self, model: ReferenceModel) -> None:
        for text in self.expected.calibration:
            encoder_answers.run_model(model, text)

    def list_limited(self, gaps: Gaps) -> Iterator[Limited]:
        for measure in encoder_answers.list_text_measures(self.expected):
            yield measure.prefix, gaps.get(measure.prefix), measure.limited

    def open(self, artifact: Artifact, open_program: OpenProgram) -> Encoder:
        return Encoder(open_program(artifact), artifact, self.padding)

    def list_cases(self, engine: Encoder, artifact: Artifact, limits: Limits) -> dict[str, cases.Case]:
        return list_encoder_comparisons(engine, self.expected, limits)

    def list_slow_cases(self, engine: Encoder, artifact: Artifact, limits: Limits) -> dict[str, cases.Case]:
        numbers = self.choose_replay_texts()
        measures = encoder_answers.list_text_measures(self.expected)
        batch = make_case(f"{len(numbers)} texts, padded", self.expected.texts, numbers, measures)
        longest = max(
            self.expected.cases, key=lambda case: case.rows[0].ends[0] if len(case.rows) == 1 else 0
        )
        few = replace(self.expected, cases=(batch, longest))
        return list_encoder_comparisons(engine, few, limits)

    def make_replay(self, artifact: Artifact, whole: bool = False) -> Replay:
        """Return a replay of two texts and a single token as a padded batch; a whole one has all samples."""
        real = encoder_answers.list_real_texts(self.expected)
        numbers = [*sorted(real), len(real), len(real) + 1] if whole else self.choose_replay_texts()
        case = make_case(f"{len(numbers)} texts", self.expected.texts, numbers, ())
        return make_replay(artifact, self.expected, case, EncoderReplay(artifact, self.padding))

    def make_spot_replay(self, artifact: Artifact, spot: Spot) -> Replay | None:
        number, _, row = spot
        task = EncoderReplay(artifact, self.padding)
        return make_replay(artifact, self.expected, self.expected.cases[number], task, row)

    def choose_replay_texts(self) -> list[int]:
        """Return the numbers of two texts and of a single token, which stands behind the real ones."""
        real = sorted(encoder_answers.list_real_texts(self.expected))
        return [*real[:2], len(real)]


@dataclass(frozen=True)
class EncoderReplay:
    """How an encoder's cases are replayed."""

    artifact: Artifact
    padding: int

    def drive(self, program: Program, case_set: CaseSet, case: Case) -> None:
        for _ in run(Encoder(program, self.artifact, self.padding), case_set, 0, case):
            pass

    def read(self, case_set: CaseSet, row: Row, model: ReferenceModel, rounding: Rounding | None) -> object:
        """Run PyTorch over the text of a row."""
        return encoder_answers.run_model(model, case_set.texts[row.text])


def add_fitted_head(
    old: EncoderExaminer, new: Bundle, limits: Mapping[str, Limits]
) -> tuple[EncoderExaminer, dict[str, dict[str, float]]]:
    """Return the examiner of a bundle with a fitted head, and its limits, from those without the head.

    The head's limits are the caps alone: without PyTorch the effect of rounding is not known.
    """
    head = LinearHead.load(new)
    assert head is not None
    artifact = old.bundle.manifest.artifacts[0]
    spec = new.manifest.artifacts[0].output(HEAD)
    encoder = old.open(artifact, lambda each: OrtCpuBackend().open(old.bundle, each))
    roles = [s.role for s in artifact.outputs if s.role.startswith(("hidden.", "sentence_embedding"))]
    last = max(int(role.removeprefix("hidden.")) for role in roles if role.startswith("hidden."))
    logits = {}
    for number, text in enumerate(old.expected.texts):
        (arrays,) = encoder.run_batch([make_piece(text)], roles)
        states = dict(zip(roles, arrays, strict=True))
        by_layer = [states.get(f"hidden.{layer}", np.empty(0)) for layer in range(last + 1)]
        values = head.compute_logits(by_layer, states.get("sentence_embedding"))
        logits[number] = Known(np.array([0]), values[None])
    encoder.close()
    kind = read_problem_type(new)

    def add_measure(case: Case) -> Case:
        of_texts = not case.name.startswith(RANDOM)
        return replace(case, measures=(*case.measures, make_measure(spec, kind, of_texts)))

    expected = replace(
        old.expected,
        cases=tuple(map(add_measure, old.expected.cases)),
        answers={**old.expected.answers, spec.name: logits},
    )
    examiner = EncoderExaminer(new, expected)
    return examiner, {name: {**examiner.choose_limits(name, {}), **own} for name, own in limits.items()}
