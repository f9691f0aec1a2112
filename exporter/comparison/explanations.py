"""Compares the graphs that explain a model with PyTorch, or with what PyTorch said at export.

B texts of T tokens, S tokens of a source, N hidden states, K tokens that are asked for
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...runtime.backends.backend import Array, Arrays, Program
from ...runtime.backends.ort_backend import OrtCpuBackend
from ...runtime.bundle.bundle import Bundle
from ...runtime.bundle.manifest import Artifact, Axis, TensorSpec
from ...runtime.diagnostics.golden.files import choose_evenly, name_damage, read_golden, write_golden
from ...runtime.diagnostics.metrics import Comparison, measure_spread
from ...runtime.errors import BackendError
from ...runtime.progress import CountedLine
from ..errors import VerificationError
from ..limits import CAPS, GAP_FACTOR
from ..tracing.recipes import Recipe

if TYPE_CHECKING:
    from torch import nn

    from .examiner import Progress

PREFIX = "checks/explain-"  # of the file of what PyTorch said
# Texts and tokens of each case: one alone, several of one length, and a single token.
CASES = {"a text of 11 tokens": (1, 11), "three texts of 5 tokens": (3, 5), "one token": (1, 1)}
LONG = 160  # tokens of the longest case, where the model reads so many; more where a window is longer
MOST_LONG = 1024
KEPT_CASE = "three texts of 5 tokens"
KEPT_NUMBERS = 256  # of each result, that a bundle keeps
CLASSES = 3  # of the head that a vector's gradient is asked through
OBJECTIVES = {"logit": 0, "probability by softmax": 1, "probability by sigmoid": 2}
WHOLE_NUMBERS = ("ranks", "likeliest")


@dataclass(frozen=True, eq=False)
class Case:
    """Inputs of a graph, and what PyTorch makes of them.

    `ties` has the lowest and highest rank that rounding may make of each, and under "likeliest" the logits
    (N, V) that tokens are held to, and how near to each other two of them may change places.
    """

    name: str
    inputs: Arrays
    outputs: Arrays
    limit: float = CAPS["fp32"]["max_error"]
    wider: Mapping[str, float] = field(
        default_factory=dict
    )  # limits of outputs that PyTorch itself rounds more
    ties: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    chosen: int | None = None  # how many numbers of each output are kept; None means all

    def find_limit(self, output: str) -> float:
        """Return how far an output may be off."""
        return max(self.limit, self.wider.get(output, 0.0))


@dataclass(frozen=True, eq=False)
class JudgedGraphs:
    """How the graphs compare, their cases by their ids with the limits that counted, and which failed."""

    comparisons: list[Comparison]
    cases: dict[str, list[Case]]
    failed: dict[str, Case]


class Reference:
    """What PyTorch says of a model's explanations, in cases that a seed draws."""

    def __init__(self, model: nn.Module, recipes: Mapping[str, Recipe], seed: int) -> None:
        self.model = model
        self.recipes = recipes
        self.random = np.random.default_rng(seed)
        self.layers = next(recipe for recipe in recipes.values() if recipe.graph == "layers")

    def list_cases(self, recipe: Recipe) -> Iterator[Case]:
        """Yield the cases of a graph."""
        long = self.choose_length()
        for name, (batch, tokens) in {**CASES, f"a text of {long} tokens": (1, long)}.items():
            if recipe.graph == "gradient":
                for objective, number in OBJECTIVES.items():
                    yield self.make_case(recipe, f"{objective}, {name}", batch, tokens, number)
            else:
                yield self.make_case(recipe, name, batch, tokens)

    def choose_length(self) -> int:
        """Return the length of the longest case: beyond the longest window, and at most the model's."""
        config: Any = self.model.config
        windows = [window for window in getattr(config, "windows", ()) if window is not None]
        windows += [getattr(config, "local_attention", 0)]
        longest = next(
            axis.max for axis in self.layers.inputs[0].axes if isinstance(axis, Axis) and axis.name != "batch"
        )
        return int(min(longest - 2, MOST_LONG, max(LONG, *(window + 2 for window in windows))))

    def make_case(self, recipe: Recipe, name: str, batch: int, tokens: int, objective: int = 0) -> Case:
        """Return inputs that are drawn, and PyTorch's results, with the limit that its own rounding sets."""
        inputs = self.draw_inputs(recipe, batch, tokens, objective)
        outputs = compute(self.model, recipe, inputs)
        ties = {} if "likeliest" not in outputs else find_ties(self.model, recipe, inputs)
        limit = CAPS["fp32"]["max_error"]
        if objective != OBJECTIVES["logit"]:  # a probability is off by a share that is its logit's error
            logits = compute(self.model, recipe, {**inputs, "objective": np.array([OBJECTIVES["logit"]])})
            limit *= max(1.0, float(np.abs(logits["score"]).max()))
        return Case(name, inputs, outputs, limit, ties=ties)

    def draw_inputs(self, recipe: Recipe, batch: int, tokens: int, objective: int) -> dict[str, Array]:
        """Return a graph's inputs: tokens are drawn, embeddings and hidden states are those of tokens."""
        sizes = {
            "batch": batch,
            "tokens": tokens,
            "source_tokens": tokens + 2,
            "classes": CLASSES,
            "asked": 3,
        }
        if recipe.graph == "layers":
            return {spec.name: self.draw(spec, sizes, tokens) for spec in recipe.inputs}
        ids = self.draw_inputs(self.layers, batch, tokens, 0)
        inside = compute(self.model, self.layers, ids)
        inside.setdefault("embeddings", inside["hidden.0"])  # where nothing is between the two
        states = np.stack([array for name, array in inside.items() if name.startswith("hidden.")])
        inputs: dict[str, Array] = {}
        for spec in recipe.inputs:
            if spec.name in inside:  # embeddings, and on the way to them
                inputs[spec.name] = inside[spec.name] * np.float32(self.random.choice([1.0, 0.3]))
            elif spec.name == "hidden":
                inputs["hidden"] = (
                    states[:, 0] if len(spec.axes) == 3 else states.reshape(-1, states.shape[-1])
                )
                sizes["states"] = len(inputs["hidden"])
            elif spec.name == "objective":
                inputs["objective"] = np.array([objective])
            else:
                inputs[spec.name] = self.draw(spec, sizes, tokens)
        return inputs

    def draw(self, spec: TensorSpec, sizes: Mapping[str, int], tokens: int) -> Array:
        """Return an input of any values that the model takes."""
        shape = [sizes[axis.name] if isinstance(axis, Axis) else axis for axis in spec.axes]
        if spec.dtype == "float32":
            return self.random.standard_normal(shape, np.float32)
        config: Any = self.model.config
        most = {
            "row": tokens,
            "token_type_ids": getattr(config, "type_vocab_size", 1),
            "source_ids": getattr(config, "source_vocab_size", 1),
        }
        if spec.name == "target" and not hasattr(self.model, "lm_head") and hasattr(config, "heads"):
            most["target"] = config.num_labels if config.heads else CLASSES
        return self.random.integers(0, most.get(spec.name, config.vocab_size), shape)


def compute(model: nn.Module, recipe: Recipe, inputs: Arrays) -> dict[str, Array]:
    """Return a graph's results as PyTorch computes them, without tracing anything."""
    import torch

    assert recipe.reference is not None
    tensors = [torch.from_numpy(np.ascontiguousarray(inputs[spec.name])) for spec in recipe.inputs]
    dtype = next(model.parameters()).dtype
    tensors = [tensor.to(dtype) if tensor.is_floating_point() else tensor for tensor in tensors]
    with torch.no_grad():
        results = recipe.reference(model)(*tensors)
    results = results if isinstance(results, tuple) else (results,)
    arrays = (result.detach().numpy() for result in results)
    return dict(zip((spec.name for spec in recipe.outputs), arrays, strict=True))


def find_ties(model: nn.Module, recipe: Recipe, inputs: Arrays) -> dict[str, tuple[Any, Any]]:
    """Return the lowest and highest rank (N, K) that each token may have, as logits differ by rounding.

    And the logits, with how far apart two of them may change places.
    """
    import torch

    assert recipe.module is not None
    lens: Any = recipe.module(model)
    with torch.no_grad():
        logits = lens.compute_logits(torch.from_numpy(inputs["hidden"]).to(next(model.parameters()).dtype))
    logits = logits.double().numpy()  # (N, V)
    near = CAPS["fp32"]["max_error"] * measure_spread(logits)
    chosen = np.take_along_axis(logits, inputs["tokens"], axis=1)[:, :, None]  # (N, K, 1)
    above = (logits[:, None] > chosen + near).sum(-1) + 1
    level = (logits[:, None] > chosen - near).sum(-1)
    return {"ranks": (above, np.maximum(above, level)), "likeliest": (logits, near)}


def compare_explanations(
    bundle: Bundle,
    model: nn.Module,
    recipes: Mapping[str, Recipe],
    seed: int,
    progress: Progress,
) -> JudgedGraphs:
    """Compare the graphs that explain a model with PyTorch."""
    reference = Reference(model, recipes, seed)
    judged = JudgedGraphs([], {}, {})
    for artifact in bundle.manifest.explanations:
        cases = list(reference.list_cases(recipes[artifact.recipe_id]))
        for case, comparison in run_cases(bundle, artifact, cases, progress):
            if not comparison.passed:
                case = widen(case, model, recipes[artifact.recipe_id])
                ((_, comparison),) = run_cases(bundle, artifact, [case], lambda _: None)
            judged.comparisons.append(comparison)
            judged.cases.setdefault(artifact.id, []).append(case)
            if not comparison.passed:
                judged.failed.setdefault(artifact.id, case)
    return judged


def widen(case: Case, model: nn.Module, recipe: Recipe) -> Case:
    """Return the case with wider limits of outputs in which PyTorch in fp32 is itself far from float64."""
    exact = compute(copy.deepcopy(model).double(), recipe, case.inputs)
    wider = {
        name: GAP_FACTOR * measure(case.outputs[name], exact[name])
        for name in exact
        if name not in WHOLE_NUMBERS
    }
    return replace(case, wider=wider)


def run_cases(
    bundle: Bundle, artifact: Artifact, cases: Sequence[Case], progress: Progress
) -> Iterator[tuple[Case, Comparison]]:
    """Run a graph on ONNX Runtime, and yield each case with how it compares."""
    backend = OrtCpuBackend()
    try:
        program = backend.open(bundle, artifact)
    except BackendError as error:
        for case in cases[:1]:
            yield case, Comparison.from_error(artifact.id, backend.name, "opening it", error)
        return
    try:
        for number, case in enumerate(cases):
            progress(CountedLine(f"verifying {artifact.id}: {case.name}", number, len(cases), "cases"))
            yield case, run_case(program, artifact, case, backend.name)
    finally:
        program.close()


def run_case(program: Program, artifact: Artifact, case: Case, backend: str) -> Comparison:
    try:
        got = program.run(case.inputs, {})
    except BackendError as error:
        return Comparison.from_error(artifact.id, backend, case.name, error)
    errors: dict[str, float] = {}
    failures = []
    for name, want in case.outputs.items():
        have = got[name]
        if case.chosen is not None and name not in WHOLE_NUMBERS:
            have = choose_numbers(have, case.chosen)
        if name in WHOLE_NUMBERS:
            wrong = count_wrong(name, have, want, case)
            if wrong:
                failures.append(f"{name}: {wrong} of {have.size} are not PyTorch's")
            continue
        # Of logits the unit is 1 where their spread is less: one alone may be near zero.
        is_logit = name == "score" and not case.inputs["objective"].any()
        errors[name] = measure(have, want, least=1.0 if is_logit else 1e-30)
        limit = case.find_limit(name)
        if not errors[name] <= limit:
            failures.append(f"{name}: max_error {errors[name]:.3g} > {limit:.3g}")
    worst = max(errors, key=lambda name: errors[name] / case.find_limit(name))
    return Comparison(
        {"max_error": errors[worst]},
        {"max_error": case.find_limit(worst)},
        tuple(failures[:3]),
        artifact=artifact.id,
        backend=backend,
        case=case.name,
    )


def count_wrong(name: str, have: Array, want: Array, case: Case) -> int:
    """Return how many whole numbers are wrong, but for ties: without the logits, those that are others."""
    if name not in case.ties:
        return int((have != want).sum())
    if name == "ranks":
        low, high = case.ties[name]
        return int(((have < low) | (have > high)).sum())
    logits, near = case.ties[name]
    in_range = (have >= 0) & (have < logits.shape[1])
    own = np.take_along_axis(logits, np.where(in_range, have, 0), axis=1)
    meant = np.take_along_axis(logits, want, axis=1)
    return int((~in_range | (np.abs(own - meant) > near)).sum())


def measure(got: Array, want: Array, least: float = 1e-30) -> float:
    """Return the largest difference in units of the spread of `want`, at least `least`.

    Infinite where shapes differ.
    """
    if got.shape != want.shape:
        return float("inf")
    exact = want.astype(np.float64)
    return float(np.abs(got - exact).max()) / max(measure_spread(exact), least)


def choose_numbers(array: Array, most: int) -> Array:
    """Return at most so many of an array's numbers, evenly chosen."""
    return array.reshape(-1)[list(choose_evenly(array.size, most))]


def keep_cases(folder: Path, name: str, judged: JudgedGraphs) -> None:
    """Write the cases of short texts below a bundle's folder: inputs, some of PyTorch's numbers, limits."""
    arrays: dict[str, Array] = {}
    limits: dict[str, dict[str, float]] = {}
    for artifact, cases in judged.cases.items():
        for case in cases:
            if not case.name.endswith(KEPT_CASE):
                continue
            label = f"{artifact}/{case.name}"
            limits[label] = {key: case.find_limit(key) for key in case.outputs}
            arrays |= {f"{label}/input/{key}": array for key, array in case.inputs.items()}
            arrays |= {
                f"{label}/output/{key}": choose_numbers(array, KEPT_NUMBERS)
                for key, array in case.outputs.items()
                if key not in WHOLE_NUMBERS
            }
            if "ranks" in case.ties:
                low, high = case.ties["ranks"]
                arrays |= {f"{label}/low/ranks": low, f"{label}/high/ranks": high}
    (folder / "checks").mkdir(exist_ok=True)
    write_golden(folder / f"{PREFIX}{name}.npz", arrays, limits)


def read_cases(path: Path) -> dict[str, list[Case]]:
    """Return the cases that `keep_cases` wrote, by their graphs' ids."""
    arrays, limits = read_golden(path)
    cases: dict[str, list[Case]] = {}
    for label, wider in limits.items():
        artifact, name = label.split("/")
        sides: dict[str, dict[str, Array]] = {"input": {}, "output": {}, "low": {}, "high": {}}
        for key, array in arrays.items():
            if key.startswith(f"{label}/"):
                _, _, side, output = key.split("/")
                sides[side][output] = array
        ties = {"ranks": (sides["low"]["ranks"], sides["high"]["ranks"])} if sides["low"] else {}
        outputs = {**sides["output"], **sides["low"]}
        case = Case(name, sides["input"], outputs, wider=wider, ties=ties, chosen=KEPT_NUMBERS)
        cases.setdefault(artifact, []).append(case)
    return cases


def compare_kept(bundle: Bundle, progress: Progress) -> list[Comparison]:
    """Compare the graphs with what PyTorch said at export."""
    names = [name for name in bundle.manifest.files if name.startswith(PREFIX)]
    if not names:
        raise VerificationError(
            f"{bundle.folder} has graphs that explain, and nothing to compare them with; pass --source MODEL"
        )
    with name_damage(bundle):
        cases = read_cases(bundle.path(names[0]))
        return [
            comparison
            for artifact in bundle.manifest.explanations
            for _, comparison in run_cases(bundle, artifact, cases[artifact.id], progress)
        ]
