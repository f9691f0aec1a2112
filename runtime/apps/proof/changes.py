"""Compares what was measured of two bundles on the same texts: which differences are more than chance."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import InputError
from .evidence import CLASSIFY, Proof
from .intervals import CONFIDENCE, find_f1_chance, find_mcnemar_probability, find_perplexity_chance


@dataclass(frozen=True)
class Change:
    """How much better or worse one measure of a new bundle is.

    Attributes:
        measure: "accuracy", "f1" or "perplexity".
        old: its value before.
        new: its value now.
        chance: how likely chance makes two equal models differ as much.
    """

    measure: str
    old: float
    new: float
    chance: float

    @property
    def is_regression(self) -> bool:
        """Whether it is worse by more than chance explains."""
        is_worse = self.new > self.old if self.measure == "perplexity" else self.new < self.old
        return is_worse and self.chance <= 1 - CONFIDENCE

    def to_json(self) -> dict[str, Any]:
        """Return its fields, and whether it is a regression."""
        return {**vars(self), "regression": self.is_regression}


@dataclass(frozen=True)
class ProofPair:
    """The evidence of two bundles that is compared, what changed, or why the two cannot be compared."""

    old: Proof
    new: Proof
    changes: tuple[Change, ...] = ()
    refused: str = ""

    @property
    def is_regression(self) -> bool:
        return any(change.is_regression for change in self.changes)

    def to_json(self) -> dict[str, Any]:
        """Return the fields of `--json`, without each text's answer."""
        sides = {"old": self.old, "new": self.new}
        return {
            **{name: summarize(proof) for name, proof in sides.items()},
            "changes": [change.to_json() for change in self.changes],
            "regression": self.is_regression,
            "refused": self.refused,
        }


def summarize(proof: Proof) -> dict[str, Any]:
    """Return a proof as JSON without what it has of each text."""
    of_texts = ("truth", "answers", "reference", "losses", "tokens", "reference_losses")
    value = {name: part for name, part in proof.to_json().items() if name not in of_texts}
    return value | {"texts": proof.texts, "flips": proof.count_flips()}


def compare_proofs(old: Proof, new: Proof) -> ProofPair:
    """Compare two measurements on the same texts, each text with itself.

    Accuracy is compared by McNemar's exact test, F1 and perplexity by a paired randomization test. A measure
    has regressed where it is worse, and chance makes equal models differ as much in at most 5 % of cases.

    Raises:
        InputError: they are of other texts, or of other tokens of them.
    """
    sides = [
        (one.data["sha256"], one.task, one.texts, [one.labels[number] for number in one.truth])
        for one in (old, new)
    ]
    if sides[0] != sides[1]:
        told = [f"{one.artifact} on {one.texts} texts of {one.data['name']}" for one in (old, new)]
        raise InputError(f"{' and '.join(told)} were measured on other texts, or with other labels of them")
    changes = list_label_changes(old, new) if new.task == CLASSIFY else list_loss_changes(old, new)
    return ProofPair(old, new, tuple(changes))


def list_label_changes(old: Proof, new: Proof) -> Iterator[Change]:
    """Yield how accuracy and F1 of a classifier changed."""
    truth = [new.labels[number] for number in new.truth]
    before = [old.labels[number] for number in old.answers]
    after = [new.labels[number] for number in new.answers]
    right = [(a == t, b == t) for a, b, t in zip(before, after, truth, strict=True)]
    lost = sum(was and not now for was, now in right)
    gained = sum(now and not was for was, now in right)
    was, now = (proof.intervals for proof in (old, new))
    chance = find_mcnemar_probability(gained, lost)
    yield Change("accuracy", was["accuracy"].value, now["accuracy"].value, chance)
    names = sorted({*truth, *before, *after})
    numbers = ([names.index(label) for label in labels] for labels in (truth, before, after))
    yield Change("f1", was["f1"].value, now["f1"].value, find_f1_chance(*numbers))


def list_loss_changes(old: Proof, new: Proof) -> Iterator[Change]:
    """Yield how the perplexity of a generator changed."""
    if old.tokens != new.tokens:
        raise InputError(
            f"{old.artifact} and {new.artifact} read the texts as other tokens, so perplexities are not"
            " comparable; compare bundles of one tokenizer"
        )
    was, now = (proof.intervals["perplexity"].value for proof in (old, new))
    yield Change("perplexity", was, now, find_perplexity_chance(old.losses, new.losses))


def pair_proofs(old: Sequence[Proof], new: Sequence[Proof]) -> list[ProofPair]:
    """Compare each new measurement with the old one that is likest: on the same file of texts, else none.

    The likest has as many texts; of several the same precision; of these the same backend, machine, threads.
    """
    pairs = []
    for proof in new:
        same = [one for one in old if one.data["sha256"] == proof.data["sha256"]]
        if same:
            likest = min(same, key=lambda one: measure_distance(one, proof))
            try:
                pairs.append(compare_proofs(likest, proof))
            except InputError as error:
                pairs.append(ProofPair(likest, proof, refused=str(error)))
    return pairs


def measure_distance(old: Proof, new: Proof) -> tuple[bool, ...]:
    """Return what differs between two measurements, what matters most first."""
    names = ("task", "texts", "precision", "backend", "machine", "threads")
    return tuple(getattr(old, name) != getattr(new, name) for name in names)
