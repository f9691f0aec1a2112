"""The two sides of a comparison of evidence: a bundle, or what was measured of it in one precision."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ...runtime.apps.commands.console import split_names
from ...runtime.apps.proof.evidence import Proof, read_evidence
from ...runtime.backends.select import BACKEND_PRIORITY
from ...runtime.bundle.artifact import IN_HALF
from ...runtime.bundle.bundle import Bundle
from ...runtime.errors import InputError
from ...runtime.suggest import did_you_mean

CPU = "ort-cpu"


@dataclass(frozen=True)
class Side:
    """A bundle, and the precision and the backend whose evidence is compared; None for any."""

    bundle: Bundle
    precision: str | None = None
    backend: str | None = None

    @property
    def name(self) -> str:
        """Return it in words: "B in int8 on ort-cpu"."""
        precision = "" if self.precision is None else f" in {self.precision}"
        return f"{self.bundle.folder}{precision}{'' if self.backend is None else f' on {self.backend}'}"

    def read_proofs(self) -> list[Proof]:
        """Return its evidence."""
        return [
            proof
            for proof in read_evidence(self.bundle)
            if self.has_precision(proof) and self.backend in (None, proof.backend)
        ]

    def has_precision(self, proof: Proof) -> bool:
        """Tell whether evidence is of this precision; on a GPU int8 and int4 stand for w8a16 and w4a16."""
        names = {None, proof.precision}
        if proof.backend != CPU:
            names |= {name for name, half in IN_HALF.items() if half == proof.precision}
        return self.precision in names

    def make_command(self, data: str | Path) -> str:
        """Return the command that measures it on a file of texts."""
        options = {"--precision": self.precision, "--backend": self.backend}
        given = "".join(f" {option} {value}" for option, value in options.items() if value is not None)
        return f"planforge prove {self.bundle.folder} --data {data}{given}"


def open_sides(old: Path, new: Path | None, precision: str | None, backend: str | None) -> list[Side]:
    """Return the old side and the new one, which without a second bundle are of one.

    Each option names what both sides have, or the old one's and the new one's: "fp16,int8".
    """
    bundles = [Bundle.open(folder) for folder in ((old,) if new is None else (old, new))]
    precisions = split_pair("--precision", precision)
    backends = split_pair("--backend", backend)
    for name in backends:
        if name not in (None, *BACKEND_PRIORITY):
            hint = did_you_mean(str(name), BACKEND_PRIORITY)
            raise InputError(f"--backend {name!r} is not one of {', '.join(BACKEND_PRIORITY)}{hint}")
    sides = [
        Side(bundle, find_precision("--precision", bundle, name), on)
        for bundle, name, on in zip((bundles[0], bundles[-1]), precisions, backends, strict=True)
    ]
    if new is None and sides[0] == sides[1]:
        found = dict.fromkeys(f"{proof.precision} on {proof.backend}" for proof in read_evidence(bundles[0]))
        measured = f"; measured are {' and '.join(found)}" if found else ""
        raise InputError(
            f"{old} is the only bundle, and has one side: give a second bundle, or two precisions or backends"
            f" of this one, as in --precision fp16,int8{measured}"
        )
    return sides


def split_pair(option: str, text: str | None) -> Sequence[str | None]:
    """Return the old side's name and the new one's, which a single name is both of."""
    names: Sequence[str | None] = split_names(option, text) or [None]
    if len(names) > 2:
        raise InputError(f"{option} {text!r} has {len(names)} names; give one for both sides, or two")
    return [names[0], names[-1]]


def find_precision(option: str, bundle: Bundle, name: str | None) -> str | None:
    """Return a precision that a bundle has; int8 and int4 stand for w8a16 and w4a16 where only those are."""
    present = list(dict.fromkeys(artifact.precision for artifact in bundle.manifest.artifacts))
    if name is None or name in present:
        return name
    if (half := IN_HALF.get(name)) in present:
        return half
    raise InputError(
        f"{option} {name!r}: {bundle.folder} has no graphs in that precision; it has some in"
        f" {', '.join(present)}{did_you_mean(name, present)}"
    )
