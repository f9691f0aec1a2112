"""Chooses the bundle's graphs for a package, or refuses with the export to run instead."""

from __future__ import annotations

from collections.abc import Sequence

from ...runtime.bundle.artifact import RECENT, Artifact
from ...runtime.bundle.bundle import Bundle
from ...runtime.bundle.export_again import suggest_export_again
from ...runtime.errors import InputError
from ...runtime.suggest import did_you_mean
from ...runtime.text.piece_tokenizer import PIECES
from ..precisions import PRECISIONS
from .encoders import check_heads
from .recipes import Recipe

DIALECT = "ort"  # of graphs whose cache and padding others can be given


def choose_artifacts(bundle: Bundle, recipe: Recipe, precision: Sequence[str] | None) -> list[Artifact]:
    """Return the graphs of a package; refuse graphs that the runtime cannot take, with the export to run."""
    check_model(bundle, recipe)
    if isinstance(precision, str):
        precision = [precision]
    named = list(dict.fromkeys(precision or ()))
    for name in named:
        if name not in recipe.precisions:
            hint = did_you_mean(recipe.find_precision(name), recipe.precisions)
            raise InputError(f"precision {name!r}: {recipe.title} takes {', '.join(recipe.precisions)}{hint}")
    artifacts = bundle.manifest.artifacts
    candidates = [a for a in artifacts if a.dialect == DIALECT and a.precision in recipe.precisions]
    there = list(dict.fromkeys(artifact.precision for artifact in candidates))
    if missing := [name for name in named if name not in there]:
        only = f", only in {', '.join(there)}" if there else ""
        raise InputError(
            f"{bundle.folder} has no graph in {missing[0]} of the dialect {DIALECT}{only}:"
            f" {tell_export(bundle, [*there, missing[0]])}"
        )
    if not there:
        takes = [artifact.precision for artifact in artifacts if artifact.precision in recipe.precisions]
        raise InputError(
            f"{recipe.title} takes graphs of the dialect {DIALECT} in {', '.join(recipe.precisions)};"
            f" {bundle.folder} has {', '.join(artifact.id for artifact in artifacts)}:"
            f" {tell_export(bundle, takes[:1] or ['fp32'])}"
        )
    wanted = named or choose_precisions(bundle.manifest.default_precision, there, recipe)
    if len(wanted) > 1 and not recipe.many:
        raise InputError(
            f"a package for {recipe.title} has one precision, not {', '.join(wanted)}; choose one"
        )
    return check_caches([artifact for artifact in candidates if artifact.precision in wanted], recipe)


def check_model(bundle: Bundle, recipe: Recipe) -> None:
    """Refuse a task that the runtime does not support, and tokenizers that it cannot read."""
    manifest = bundle.manifest
    if manifest.task not in recipe.tasks:
        raise InputError(
            f"{recipe.title} takes {' and '.join(recipe.tasks)}; {bundle.folder} is a bundle for"
            f" {manifest.task}"
        )
    if manifest.generation is not None and manifest.generation.adapters:
        raise InputError(
            f"{recipe.title} does not choose adapters by request; merge one with `planforge export MODEL"
            " --adapter FOLDER`, and package that bundle"
        )
    if any(artifact.keeps_state for artifact in manifest.artifacts):
        raise InputError(
            f"{recipe.title} does not run recurrent decoders, which keep states in place of a cache; run"
            f" {bundle.folder} with planforge.runtime"
        )
    if manifest.encoder is not None and not recipe.takes_texts:
        check_heads(manifest, recipe.title)
    if manifest.tokenizer.get("kind") == PIECES and not recipe.takes_texts:
        raise InputError(
            f"{bundle.folder} has MarianMT's tokenizers, whose pieces and ids come from different files;"
            f" {recipe.title} does not reproduce them exactly: package it with --for triton"
        )


def tell_export(bundle: Bundle, precisions: Sequence[str]) -> str:
    """Return the command that exports these precisions of the dialect; those in fp16 are for a GPU alone."""
    targets = ["cuda" if PRECISIONS[precision].is_half else "cpu" for precision in precisions]
    again = suggest_export_again(bundle, precisions=precisions, targets=targets)
    if not bundle.manifest.source.get("exporter"):
        return again
    return f"{again}, unless that warns that the model's own attention is kept"


def choose_precisions(default: str | None, there: Sequence[str], recipe: Recipe) -> list[str]:
    """Return the precisions that are packaged unless some are named."""
    if recipe.many:
        return list(there)
    return [default] if default is not None and default in there else [there[0]]


def check_caches(artifacts: list[Artifact], recipe: Recipe) -> list[Artifact]:
    """Return the graphs; refuse those whose caches differ in length."""
    for artifact in artifacts:
        if any(RECENT in spec.axis_names() for spec in artifact.inputs):
            raise InputError(
                f"{artifact.id}: some layers cache only the newest {artifact.window} tokens, and"
                f" {recipe.title} does not support caches of two lengths"
            )
    return artifacts
