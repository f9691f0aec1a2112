"""Fits a classifier on a frozen encoder: a bundle's features, scikit-learn's LogisticRegression, one Gemm.

N texts, F features, C classes
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import logging
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ...runtime import TextEncoder
from ...runtime.bundle.bundle import Bundle
from ...runtime.bundle.defaults import EncoderDefaults, FittedHead
from ...runtime.bundle.manifest import Artifact, Manifest, TensorSpec
from ...runtime.encode.pooling import LAYERS, pool_tokens
from ...runtime.errors import InputError
from ...runtime.tasks import refuse_others
from ..bundle.names import name_by_content, name_export
from ..bundle.writer import check_output, install, list_file_entries, open_staging_folder, write_manifest
from ..checkpoints.source import locate_from
from ..errors import ExportError
from ..tasks.fitted_head import CLS, EMBEDDING, HEAD, TAGS
from ..tensorrt.plans import Progress
from ..verification.explanations import PREFIX as EXPLANATIONS
from .labelled_texts import Table, read_table
from .regression import Fitted, check_counts, fit
from .tagged_texts import Words, predict_words, read_tagged_table, read_words

log = logging.getLogger("planforge")

Array: TypeAlias = npt.NDArray[Any]
TIE = 1e-4  # logits that are closer may change places by rounding alone


@dataclass(frozen=True)
class FitResult:
    """A classifier and how well it does on texts that it was not trained on.

    Attributes:
        bundle: the folder of the encoder with its new head.
        labels: the classes, in the order of the logits.
        accuracy: on the held-out texts, or words.
        confusion: confusion[i][j] held-out texts, or words, of class i were taken for class j.
        C: the regularization that cross-validation chose inside the training part.
        training: how many texts, or words, it was fitted to.
        picture: the confusion matrix as a PNG file.
        unit: what is counted, "texts" or "words".
    """

    bundle: Path
    labels: tuple[str, ...]
    accuracy: float
    confusion: tuple[tuple[int, ...], ...]
    C: float
    training: int
    picture: Path
    unit: str = "texts"

    def to_json(self) -> dict[str, Any]:
        """Return the fields of `planforge fit-head --json`."""
        return {**dataclasses.asdict(self), "bundle": str(self.bundle), "picture": str(self.picture)}


def fit_head(
    bundle: str | Path,
    table: str | Path,
    output: str | Path,
    *,
    features: str | None = None,
    per_token: bool = False,
    test_share: float = 0.25,
    seed: int = 0,
    force: bool = False,
    progress: Progress = lambda _: None,
) -> FitResult:
    """Train a classifier on a frozen encoder and write a bundle that classifies, or tags.

    Args:
        bundle: an encoder's bundle; it stays as it is.
        table: a file with the columns text and label, in a format of `planforge batch`; see `read_table`.
            With `per_token` text and labels; see `read_tagged_table`.
        output: the new bundle's folder; must not exist unless `force`.
        features: "embedding", the vectors of `embed`; "cls", the last hidden state of the first token; or one
            of `LAYERS`, averaged over the tokens, which need a bundle exported with
            outputs=["hidden_states"] (all but "last"). By default "embedding", and of tokens "last".
        per_token: whether to classify each token, by its own features; a word counts by its first token.
        test_share: of the texts, held out to measure with.
        seed: of the split and the folds.
        force: replace the bundle at `output`.
        progress: called with a line when a stage begins.

    Raises:
        InputError: a choice, the table or the bundle cannot be used; a row is named by its line.
        ExportError: the graph's classes are not scikit-learn's.
    """
    features = features or ("last" if per_token else EMBEDDING)
    check_choices(features, per_token, test_share, seed)
    opened = Bundle.open(bundle)
    output = Path(output)
    refuse_others(opened, "fit-head")
    check_bundle(opened.manifest, opened.folder, features)
    if output.resolve() == opened.folder.resolve():
        raise InputError(f"the new bundle cannot be written over {opened.folder}, which it is made from")
    check_output(output, force)
    rows = (read_tagged_table if per_token else read_table)(Path(table))
    if not per_token:
        check_counts(
            rows.labels, test_share
        )  # those of words, which may be cut, are counted when they are read
    words = None
    with TextEncoder.load(opened.folder) as encoder:
        progress(f"computing features of {len(rows.texts)} texts")
        if per_token:
            words = read_words(encoder, rows, features, progress)
        else:
            matrix = compute_features(encoder, rows.texts, features, progress)
    progress("fitting")
    if words is None:
        fitted = fit(matrix, rows.labels, None, test_share, seed)
    else:
        fitted = fit(words.features, words.labels, words.texts, test_share, seed)
    from ..verification.golden_texts import carry_golden_texts
    from .verify_head import verify_graphs

    with open_staging_folder(output) as staging:
        manifest = write_bundle(opened, fitted, features, per_token, staging, output)
        manifest = carry_golden_texts(opened, staging, manifest)
        progress("comparing with scikit-learn")
        compare_with_scikit_learn(staging, rows, words, fitted)
        manifest = verify_graphs(opened, staging, manifest, progress)
        picture = write_report_files(staging, rows, words, fitted)
        manifest = name_export(dataclasses.replace(manifest, files=list_file_entries(staging)))
        install(staging, manifest, output, force=force)
    if opened.manifest.plans:
        log.warning("plans don't have the new head and were left out; `planforge build %s` makes one", output)
    confusion = tuple(map(tuple, fitted.confusion.tolist()))
    training = len(fitted.train)
    unit = "words" if per_token else "texts"
    picture_file = output / picture
    return FitResult(
        output, fitted.labels, fitted.accuracy, confusion, fitted.C, training, picture_file, unit
    )


def check_choices(features: str, per_token: bool, test_share: float, seed: int) -> None:
    """Refuse choices that cannot be carried out."""
    known = tuple(LAYERS) if per_token else (EMBEDDING, CLS, *LAYERS)
    if features not in known:
        raise InputError(f"features={features!r} is not one of {', '.join(known)}")
    if not isinstance(test_share, float) or not 0 < test_share < 1:
        raise InputError(f"test_share={test_share!r} must be a number between 0 and 1")
    if type(seed) is not int or not 0 <= seed < 2**32:
        raise InputError(f"seed={seed!r} must be an integer from 0 to {2**32 - 1}")


def check_bundle(manifest: Manifest, folder: Path, features: str) -> None:
    """Refuse a bundle that cannot get a head."""
    if manifest.encoder is None:
        raise InputError(f"{folder} holds a {manifest.family} for {manifest.task}; fit-head needs an encoder")
    if taken := {HEAD, TAGS} & set(manifest.encoder.heads):
        raise InputError(f"{folder} already has a {taken.pop()} head; fit-head needs a bundle without one")
    if features == CLS and ("cls" not in manifest.encoder.tokens or manifest.encoder.framed == "none"):
        raise InputError(f"features={CLS!r}: the texts of {folder} begin with no such token; leave it out")


def compute_features(encoder: TextEncoder, texts: Sequence[str], features: str, progress: Progress) -> Array:
    """Compute the features (N, F) of texts; of long ones, of their head, as `classify` sees them."""
    options: dict[str, Any] = {
        "truncation": "head",
        "progress": lambda done: progress(f"computing features: {done} of {len(texts)} texts"),
    }
    if features == EMBEDDING:
        return encoder.embed(texts, prompt="", **options)  # as classify, which has no prompts
    options["layers"] = "last" if features == CLS else features
    results = encoder.iterate("features", texts, **options)
    pooling = "cls" if features == CLS else "mean"
    return np.stack([pool_tokens(result.vectors, pooling) for result in results])


def write_bundle(
    opened: Bundle, fitted: Fitted, features: str, per_token: bool, staging: Path, output: Path
) -> Manifest:
    """Stage the graphs with their new head, and the files that stay the same."""
    import onnx_ir as ir

    from ..passes.head import AddLinearHead

    old = opened.manifest
    assert old.encoder is not None
    for folder in ("onnx", "tokenizer", "checks"):
        (staging / folder).mkdir()
    kept = [name for artifact in old.artifacts for name in artifact.data]
    kept += [name for artifact in old.explanations for name in (artifact.file, *artifact.data)]
    kept += [name for name in old.files if name.startswith(EXPLANATIONS)]
    kept += map(str, old.tokenizer["files"])
    for name in dict.fromkeys(kept):
        shutil.copyfile(opened.path(name), staging / name)
    artifacts = []
    role = TAGS if per_token else HEAD
    for artifact in old.artifacts:
        name = "logits" if all(s.name != "logits" for s in artifact.outputs) else "classification_logits"
        model = ir.load(opened.path(artifact.file))
        states, combine, normalize = choose_head_inputs(artifact, old.encoder, features)
        mask = artifact.input("mask").name
        AddLinearHead(states, combine, mask, fitted.weight, fitted.bias, name, normalize, per_token)(model)
        stem = Path(artifact.file).stem.rpartition("-")[0]
        file = write_named(staging, f"onnx/{stem}.onnx", partial(ir.save, model))
        axes = [artifact.axis(axis) for axis in ("batch", "tokens")[: 2 if per_token else 1]]
        spec = TensorSpec(name, role, "float32", (*axes, len(fitted.labels)))
        outputs = (*artifact.outputs, spec)
        artifacts.append(dataclasses.replace(artifact, file=file, outputs=outputs, gate={}))
    save_head = partial(np.savez, weight=fitted.weight, bias=fitted.bias)
    head_file = write_named(staging, "checks/head.npz", save_head)
    encoder = dataclasses.replace(
        old.encoder,
        heads=(*old.encoder.heads, role),
        labels=fitted.labels,
        problem_type=None if per_token else "single_label_classification",
        fitted=FittedHead(features, head_file),
    )
    manifest = dataclasses.replace(
        old,
        export_id="",
        encoder=encoder,
        artifacts=tuple(artifacts),
        plans=(),
        source=relocate_source(opened, output),
        files=list_file_entries(staging),
        tools={**old.tools, "scikit-learn": importlib.metadata.version("scikit-learn")},
    )
    write_manifest(staging, manifest)
    return manifest


def relocate_source(opened: Bundle, output: Path) -> dict[str, Any]:
    """Return where the checkpoint is from, as seen from the new bundle's folder."""
    source = dict(opened.manifest.source)
    if source.get("kind") == "folder":
        source["argument"] = locate_from(output, opened.folder / str(source["argument"]))
    return source


def write_named(staging: Path, name: str, write: Callable[[Path], object]) -> str:
    """Write a file of a bundle; return its name, which is completed by its content."""
    write(staging / name)
    return name_by_content(staging / name)[0].relative_to(staging).as_posix()


def choose_head_inputs(
    artifact: Artifact, encoder: EncoderDefaults, features: str
) -> tuple[list[str], str, bool]:
    """Return the outputs that the head reads, how they are combined, and whether their mean gets length 1."""
    last = max(int(s.role.removeprefix("hidden.")) for s in artifact.outputs if s.role.startswith("hidden."))
    if features == EMBEDDING:
        if any(spec.role == "sentence_embedding" for spec in artifact.outputs):
            return [artifact.output("sentence_embedding").name], "vector", False
        return [artifact.output(f"hidden.{last}").name], "sum", encoder.normalize
    if features == CLS:
        return [artifact.output(f"hidden.{last}").name], "cls", False
    names = [artifact.output(f"hidden.{layer}").name for layer in LAYERS[features](last)]
    return names, "concat" if features == "concat_last_four" else "sum", False


def compare_with_scikit_learn(staging: Path, rows: Table, words: Words | None, fitted: Fitted) -> None:
    """Compare the written graph with scikit-learn on every held-out text or word."""
    if words is None:
        texts = [rows.texts[i] for i in fitted.test]
        with TextEncoder.load(staging) as encoder:
            results = encoder.classify(texts, truncation="head")
        got = np.array([fitted.labels.index(str(result.label)) for result in results])
    else:
        texts = [rows.texts[text] for text in words.texts[fitted.test]]
        got = predict_words(staging, words, fitted.test)
    wrong = np.flatnonzero(got != fitted.predicted)
    if not wrong.size:
        return
    first = texts[wrong[0]]
    margin = max(fitted.margins[wrong])
    what = "texts" if words is None else "words"
    told = f"{len(wrong)} of {len(got)} held-out {what} have another class in the graph than scikit-learn's"
    if margin > TIE:
        raise ExportError(f"{told}, the first in {first!r:.80}; please report this with the table")
    log.warning("%s, all of them ties (by a margin of at most %.1g)", told, margin)


def write_report_files(staging: Path, rows: Table, words: Words | None, fitted: Fitted) -> str:
    """Write the confusion matrix as a picture, and the fit's figures; return the picture's name."""
    from matplotlib.figure import Figure
    from sklearn.metrics import ConfusionMatrixDisplay

    size = min(12.0, 2.5 + 0.6 * len(fitted.labels))
    figure = Figure(figsize=(size + 1, size), layout="constrained")
    axes = figure.add_subplot()
    what = "texts" if words is None else "words"
    axes.set_title(f"accuracy {fitted.accuracy:.4f} on {len(fitted.test)} held-out {what}")
    display = ConfusionMatrixDisplay(fitted.confusion, display_labels=fitted.labels)
    display.plot(ax=axes, cmap="Blues", xticks_rotation=45, values_format="d", im_kw={"vmin": 0})
    picture = write_named(staging, "checks/confusion.png", lambda path: figure.savefig(path, dpi=120))
    tested = fitted.test if words is None else words.texts[fitted.test]
    summary = {
        "labels": fitted.labels,
        "accuracy": fitted.accuracy,
        "confusion": fitted.confusion.tolist(),
        "C": fitted.C,
        "training": len(fitted.train),
        "held_out_lines": [rows.lines[i] for i in sorted(set(tested.tolist()))],
    }
    text = json.dumps(summary) + "\n"
    write_named(staging, "checks/fit.json", lambda path: path.write_text(text, encoding="utf-8"))
    return picture
