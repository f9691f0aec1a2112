"""Fits a classifier on a frozen encoder: a bundle's features, scikit-learn's LogisticRegression, one Gemm.

N texts, F features, C classes
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import logging
import shutil
from collections import Counter
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
from ...runtime.tasks import refuse_pictures
from ..bundle.names import name_by_content, name_export
from ..bundle.writer import check_output, install, list_file_entries, open_staging_folder, write_manifest
from ..checkpoints.source import locate_from
from ..errors import ExportError
from ..tasks.fitted_head import HEAD
from ..tensorrt.plans import Progress
from ..verification.explanations import PREFIX as EXPLANATIONS
from .labelled_texts import Table, read_table

log = logging.getLogger("planforge")

Array: TypeAlias = npt.NDArray[Any]
EMBEDDING = "embedding"
FOLDS = 5
STRENGTHS = (0.001, 0.01, 0.1, 1.0, 10.0, 100.0)  # C: larger is less regularized
TIE = 1e-4  # logits that are closer may change places by rounding alone


@dataclass(frozen=True)
class FitResult:
    """A classifier and how well it does on texts that it was not trained on.

    Attributes:
        bundle: the folder of the encoder with its new head.
        labels: the classes, in the order of the logits.
        accuracy: on the held-out texts.
        confusion: confusion[i][j] held-out texts of class i were taken for class j.
        C: the regularization that cross-validation chose inside the training part.
        training: how many texts it was fitted to.
        picture: the confusion matrix as a PNG file.
    """

    bundle: Path
    labels: tuple[str, ...]
    accuracy: float
    confusion: tuple[tuple[int, ...], ...]
    C: float
    training: int
    picture: Path

    def to_json(self) -> dict[str, Any]:
        """Return the fields of `planforge fit-head --json`."""
        return {**dataclasses.asdict(self), "bundle": str(self.bundle), "picture": str(self.picture)}


def fit_head(
    bundle: str | Path,
    table: str | Path,
    output: str | Path,
    *,
    features: str = EMBEDDING,
    test_share: float = 0.25,
    seed: int = 0,
    force: bool = False,
    progress: Progress = lambda _: None,
) -> FitResult:
    """Train a classifier on a frozen encoder and write a bundle that classifies.

    Args:
        bundle: an encoder's bundle; it stays as it is.
        table: a file with the columns text and label, in a format of `planforge batch`; see `read_table`.
        output: the new bundle's folder; must not exist unless `force`.
        features: "embedding", the vectors of `embed`; or one of `LAYERS`, averaged over the tokens,
            which need a bundle exported with outputs=["hidden_states"] (all but "last").
        test_share: of the texts, held out to measure with.
        seed: of the split and the folds.
        force: replace the bundle at `output`.
        progress: called with a line when a stage begins.

    Raises:
        InputError: a choice, the table or the bundle cannot be used; a row is named by its line.
        ExportError: the graph's classes are not scikit-learn's.
    """
    check_choices(features, test_share, seed)
    opened = Bundle.open(bundle)
    output = Path(output)
    refuse_pictures(opened, "fit-head")
    check_bundle(opened.manifest, opened.folder)
    if output.resolve() == opened.folder.resolve():
        raise InputError(f"the new bundle cannot be written over {opened.folder}, which it is made from")
    check_output(output, force)
    rows = read_table(Path(table))
    with TextEncoder.load(opened.folder) as encoder:
        progress(f"computing features of {len(rows.texts)} texts")
        matrix = compute_features(encoder, rows.texts, features, progress)
    progress("fitting")
    fitted = fit(matrix, rows, test_share, seed)
    from ..verification.golden_texts import carry_golden_texts
    from .verify_head import verify_graphs

    with open_staging_folder(output) as staging:
        manifest = write_bundle(opened, fitted, features, staging, output)
        manifest = carry_golden_texts(opened, staging, manifest)
        progress("comparing with scikit-learn")
        compare_with_scikit_learn(staging, rows, fitted)
        manifest = verify_graphs(opened, staging, manifest, progress)
        picture = write_report_files(staging, rows, fitted)
        manifest = name_export(dataclasses.replace(manifest, files=list_file_entries(staging)))
        install(staging, manifest, output, force=force)
    if opened.manifest.plans:
        log.warning("plans don't have the new head and were left out; `planforge build %s` makes one", output)
    confusion = tuple(map(tuple, fitted.confusion.tolist()))
    training = len(fitted.train)
    return FitResult(output, fitted.labels, fitted.accuracy, confusion, fitted.C, training, output / picture)


def check_choices(features: str, test_share: float, seed: int) -> None:
    """Refuse choices that cannot be carried out."""
    if features != EMBEDDING and features not in LAYERS:
        raise InputError(f"features={features!r} is not one of {', '.join([EMBEDDING, *LAYERS])}")
    if not isinstance(test_share, float) or not 0 < test_share < 1:
        raise InputError(f"test_share={test_share!r} must be a number between 0 and 1")
    if type(seed) is not int or not 0 <= seed < 2**32:
        raise InputError(f"seed={seed!r} must be an integer from 0 to {2**32 - 1}")


def check_bundle(manifest: Manifest, folder: Path) -> None:
    """Refuse a bundle that cannot get a head."""
    if manifest.encoder is None:
        raise InputError(f"{folder} holds a {manifest.family} for {manifest.task}; fit-head needs an encoder")
    if taken := {HEAD, "token_classification"} & set(manifest.encoder.heads):
        raise InputError(f"{folder} already has a {taken.pop()} head; fit-head needs a bundle without one")


def compute_features(encoder: TextEncoder, texts: Sequence[str], features: str, progress: Progress) -> Array:
    """Compute the features (N, F) of texts; of long ones, of their head, as `classify` sees them."""
    options: dict[str, Any] = {
        "truncation": "head",
        "progress": lambda done: progress(f"computing features: {done} of {len(texts)} texts"),
    }
    if features == EMBEDDING:
        return encoder.embed(texts, prompt="", **options)  # as classify, which has no prompts
    options["layers"] = features
    results = encoder.iterate("features", texts, **options)
    return np.stack([pool_tokens(result.vectors, "mean") for result in results])


@dataclass(frozen=True)
class Fitted:
    """The classifier that scikit-learn fitted: decision = weight @ features + bias."""

    labels: tuple[str, ...]
    weight: Array  # (C, F)
    bias: Array  # (C,)
    C: float
    train: Array
    test: Array
    predicted: Array  # of the held-out texts, indices of labels
    margins: Array  # by how much each was preferred to the next best
    accuracy: float
    confusion: Array


def fit(matrix: Array, rows: Table, test_share: float, seed: int) -> Fitted:
    """Split, choose C by cross-validation inside the training part, fit, and measure on the rest."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import confusion_matrix
    from sklearn.model_selection import GridSearchCV, StratifiedKFold, train_test_split

    labels = tuple(sorted(set(rows.labels)))
    y = np.array([labels.index(label) for label in rows.labels])
    needed = int(np.ceil(FOLDS / (1 - test_share))) + 1
    for label, count in sorted(Counter(rows.labels).items()):
        if count < needed:
            raise InputError(f"the class {label!r} has {count} rows; at least {needed} are needed")
    if len(y) * test_share < len(labels):
        raise InputError(f"test_share={test_share} of {len(y)} rows is less than one row per class")
    train, test = train_test_split(np.arange(len(y)), test_size=test_share, random_state=seed, stratify=y)
    folds = StratifiedKFold(FOLDS, shuffle=True, random_state=seed)
    search = GridSearchCV(LogisticRegression(max_iter=2000), {"C": STRENGTHS}, cv=folds)
    search.fit(matrix[train], y[train])
    model = search.best_estimator_
    weight = model.coef_.astype(np.float32)
    bias = model.intercept_.astype(np.float32)
    if len(labels) == 2:  # scikit-learn keeps one row: the second class against the first
        weight = np.concatenate([np.zeros_like(weight), weight])
        bias = np.concatenate([np.zeros_like(bias), bias])
    predicted = model.predict(matrix[test])
    best = np.sort(matrix[test] @ weight.T + bias, axis=1)[:, -2:]
    return Fitted(
        labels=labels,
        weight=weight,
        bias=bias,
        C=float(search.best_params_["C"]),
        train=train,
        test=test,
        predicted=predicted,
        margins=best[:, 1] - best[:, 0],
        accuracy=float((predicted == y[test]).mean()),
        confusion=confusion_matrix(y[test], predicted, labels=range(len(labels))),
    )


def write_bundle(opened: Bundle, fitted: Fitted, features: str, staging: Path, output: Path) -> Manifest:
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
    for artifact in old.artifacts:
        name = "logits" if all(s.name != "logits" for s in artifact.outputs) else "classification_logits"
        model = ir.load(opened.path(artifact.file))
        states, combine, normalize = choose_head_inputs(artifact, old.encoder, features)
        mask = artifact.input("mask").name
        AddLinearHead(states, combine, mask, fitted.weight, fitted.bias, name, normalize)(model)
        stem = Path(artifact.file).stem.rpartition("-")[0]
        file = write_named(staging, f"onnx/{stem}.onnx", partial(ir.save, model))
        spec = TensorSpec(name, HEAD, "float32", (artifact.axis("batch"), len(fitted.labels)))
        outputs = (*artifact.outputs, spec)
        artifacts.append(dataclasses.replace(artifact, file=file, outputs=outputs, gate={}))
    save_head = partial(np.savez, weight=fitted.weight, bias=fitted.bias)
    head_file = write_named(staging, "checks/head.npz", save_head)
    encoder = dataclasses.replace(
        old.encoder,
        heads=(*old.encoder.heads, HEAD),
        labels=fitted.labels,
        problem_type="single_label_classification",
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
    names = [artifact.output(f"hidden.{layer}").name for layer in LAYERS[features](last)]
    return names, "concat" if features == "concat_last_four" else "sum", False


def compare_with_scikit_learn(staging: Path, rows: Table, fitted: Fitted) -> None:
    """Compare the written graph with scikit-learn on every held-out text."""
    with TextEncoder.load(staging) as encoder:
        texts = [rows.texts[i] for i in fitted.test]
        got = [result.label for result in encoder.classify(texts, truncation="head")]
    wrong = [i for i, (a, b) in enumerate(zip(got, fitted.predicted, strict=True)) if a != fitted.labels[b]]
    if wrong:
        first = texts[wrong[0]]
        margin = max(fitted.margins[wrong])
        told = (
            f"{len(wrong)} of {len(got)} held-out texts have another class in the graph than scikit-learn's"
        )
        if margin > TIE:
            raise ExportError(f"{told}, the first is {first!r:.80}; please report this with the table")
        log.warning("%s, all of them ties (by a margin of at most %.1g)", told, margin)


def write_report_files(staging: Path, rows: Table, fitted: Fitted) -> str:
    """Write the confusion matrix as a picture, and the fit's figures; return the picture's name."""
    from matplotlib.figure import Figure
    from sklearn.metrics import ConfusionMatrixDisplay

    size = min(12.0, 2.5 + 0.6 * len(fitted.labels))
    figure = Figure(figsize=(size + 1, size), layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(f"accuracy {fitted.accuracy:.4f} on {len(fitted.test)} held-out texts")
    display = ConfusionMatrixDisplay(fitted.confusion, display_labels=fitted.labels)
    display.plot(ax=axes, cmap="Blues", xticks_rotation=45, values_format="d", im_kw={"vmin": 0})
    picture = write_named(staging, "checks/confusion.png", lambda path: figure.savefig(path, dpi=120))
    summary = {
        "labels": fitted.labels,
        "accuracy": fitted.accuracy,
        "confusion": fitted.confusion.tolist(),
        "C": fitted.C,
        "training": len(fitted.train),
        "held_out_lines": [rows.lines[i] for i in sorted(fitted.test.tolist())],
    }
    text = json.dumps(summary) + "\n"
    write_named(staging, "checks/fit.json", lambda path: path.write_text(text, encoding="utf-8"))
    return picture
