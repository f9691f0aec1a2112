"""Chooses cases for the graphs that explain a model, and has PyTorch answer them.

B texts of T tokens, N hidden states, K tokens that are asked for
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ...runtime.apps.check.files import choose_evenly
from ...runtime.apps.check.metrics import measure_spread
from ...runtime.apps.explain.objectives import COSINE, LENS_TOKENS, LOGIT, SIGMOID, SOFTMAX
from ...runtime.backends.backend import Array, Arrays
from ...runtime.bundle.manifest import Axis, TensorSpec
from ..limits import CAPS, GAP_FACTOR, measure_distance
from ..tracing.recipes import Recipe

if TYPE_CHECKING:
    from torch import nn

# Texts and tokens of each case: one alone, several of one length, and a single token.
CASES = {"a text of 11 tokens": (1, 11), "three texts of 5 tokens": (3, 5), "one token": (1, 1)}
LONG = 160  # tokens of the longest case, where the model reads so many; more where a window is longer
MAX_LONG = 1024
LAYERS = "layers"  # the graph that gives what the others read
KEPT_CASE = "three texts of 5 tokens"  # which a bundle keeps, and the longest
MAX_STATES = 64  # that a decoder's lens is asked about: it reads each alone
CLASSES = 3  # of the head that a vector's gradient is asked through
OBJECTIVES = {"logit": LOGIT, "probability by softmax": SOFTMAX, "probability by sigmoid": SIGMOID}
OF_A_VECTOR = {**OBJECTIVES, "cosine": COSINE}
MOST_LIKELY = 0.99  # probability of a token, or of a label, whose gradient is compared
MAX_TARGETS = 16  # that are tried for one of at most that probability
ROUNDINGS = 4  # sampled of a case that is beyond the usual limit
INTEGERS = ("ranks", "likeliest")
SMALLEST = 1e-30  # unit of an error: a gradient may be tiny


@dataclass(frozen=True, eq=False)
class ExplanationCase:
    """The inputs of a graph, and PyTorch's results for them.

    Of ranks `outputs` has the lowest that rounding may make of each, and of the likeliest tokens -1 where
    rounding may make another of one.
    """

    name: str
    inputs: Arrays
    outputs: Arrays
    limits: Mapping[str, float]  # how far each output may be off
    highest: Arrays = field(default_factory=dict)  # of ranks, what rounding may make of each
    ids: Arrays = field(default_factory=dict)  # what `layers` reads to give what this graph reads
    scale: float = 1.0  # of the embeddings that `layers` gives
    is_kept: bool = False  # in the bundle
    chosen: int | None = None  # how many values of each output are kept; None means all


class Reference:
    """The PyTorch model whose explanations answer random cases."""

    def __init__(self, model: nn.Module, recipes: Mapping[str, Recipe], seed: int) -> None:
        self.model = model
        self.recipes = recipes
        self.random = np.random.default_rng(seed)
        self.layers = next(recipe for recipe in recipes.values() if recipe.graph == LAYERS)

    def list_cases(self, recipe: Recipe) -> Iterator[ExplanationCase]:
        """Yield the cases of a graph."""
        long = f"a text of {self.choose_length()} tokens"
        for name, (batch, tokens) in {**CASES, long: (1, self.choose_length())}.items():
            is_kept = name in (KEPT_CASE, long)
            if recipe.graph != "gradient":
                yield replace(self.make_case(recipe, name, batch, tokens), is_kept=is_kept)
                continue
            is_of_vector = any(spec.name == "weight" for spec in recipe.inputs)
            for objective, number in (OF_A_VECTOR if is_of_vector else OBJECTIVES).items():
                case = self.make_case(recipe, f"{objective}, {name}", batch, tokens, number)
                is_enough = objective == "logit" or name != long
                if not is_certain(case):
                    yield replace(case, is_kept=is_kept and is_enough)

    def choose_length(self) -> int:
        """Return the length of the longest case: beyond the longest window, and at most the model's."""
        config: Any = self.model.config
        windows = [window for window in getattr(config, "windows", ()) if window is not None]
        windows += [getattr(config, "local_attention", 0)]
        longest = next(
            axis.max for axis in self.layers.inputs[0].axes if isinstance(axis, Axis) and axis.name != "batch"
        )
        return int(min(longest - 2, MAX_LONG, max(LONG, *(window + 2 for window in windows))))

    def make_case(
        self, recipe: Recipe, name: str, batch: int, tokens: int, objective: int = LOGIT
    ) -> ExplanationCase:
        """Return random inputs, and PyTorch's results, with the limit that its own rounding sets."""
        sizes = {
            "batch": batch,
            "tokens": tokens,
            "source_tokens": tokens + 2,
            "classes": CLASSES,
            "asked": 3,
        }
        ids = {spec.name: self.sample(spec, sizes, tokens) for spec in self.layers.inputs}
        limit = CAPS["fp32"]["max_error"]
        if recipe.graph == LAYERS:
            outputs = compute(self.model, recipe, ids)
            return ExplanationCase(name, ids, outputs, dict.fromkeys(outputs, limit))
        scale = float(self.random.choice([1.0, 0.3]))
        inputs = read_inside(recipe.inputs, compute(self.model, self.layers, ids), scale)
        sizes["states"] = len(inputs.get("hidden", ()))
        for spec in recipe.inputs:
            if spec.name == "objective":
                inputs[spec.name] = np.array([objective])
            elif spec.name not in inputs:
                inputs[spec.name] = self.sample(spec, sizes, tokens)
        if objective in (SOFTMAX, SIGMOID):
            inputs["target"] = self.choose_targets(recipe, inputs)
        outputs = compute(self.model, recipe, inputs)
        highest = {}
        if "ranks" in outputs:
            outputs["ranks"], highest["ranks"], is_clear = find_ties(self.model, recipe, inputs)
            outputs["likeliest"] = np.where(is_clear, outputs["likeliest"], -1)
        if objective in (SOFTMAX, SIGMOID):  # a probability is off by a share that is its logit's error
            logits = compute(self.model, recipe, {**inputs, "objective": np.array([LOGIT])})
            limit *= max(1.0, float(np.abs(logits["score"]).max()))
        return ExplanationCase(name, inputs, outputs, dict.fromkeys(outputs, limit), highest, ids, scale)

    def choose_targets(self, recipe: Recipe, inputs: Arrays) -> Array:
        """Return random targets, with others, if there are any, in place of those that are almost certain.

        The gradient of a probability p is p * (1 - p) times its logit's, and fp32 knows 1 - p to 2**-24 only:
        beyond `MOST_LIKELY` a comparison would be one of roundings.
        """
        targets = inputs["target"]
        for _ in range(min(MAX_TARGETS, self.count_targets() - 1)):
            score = compute(self.model, recipe, {**inputs, "target": targets})["score"]
            if not (score > MOST_LIKELY).any():
                break
            targets = np.where(score > MOST_LIKELY, (targets + 1) % self.count_targets(), targets)
        return targets

    def count_targets(self) -> int:
        """Return how many tokens, or labels, have a gradient to compute."""
        config: Any = self.model.config
        if not hasattr(self.model, "lm_head") and hasattr(config, "heads"):
            return int(config.num_labels) if config.heads else CLASSES
        return int(config.vocab_size)

    def sample(self, spec: TensorSpec, sizes: Mapping[str, int], tokens: int) -> Array:
        """Return an input of any values that the model takes."""
        shape = [sizes[axis.name] if isinstance(axis, Axis) else axis for axis in spec.axes]
        if spec.dtype == "float32":
            return self.random.standard_normal(shape, np.float32)
        config: Any = self.model.config
        most = {
            "row": tokens,
            "token_type_ids": getattr(config, "type_vocab_size", 1),
            "source_ids": getattr(config, "source_vocab_size", 1),
            "target": self.count_targets(),
        }
        return self.random.integers(0, most.get(spec.name, config.vocab_size), shape)


def is_certain(case: ExplanationCase) -> bool:
    """Tell whether a probability is so near 1 that fp32 loses its gradient, as with a single label."""
    objective = case.inputs["objective"][0]
    return objective in (SOFTMAX, SIGMOID) and bool((case.outputs["score"] > MOST_LIKELY).any())


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


def read_inside(specs: Sequence[TensorSpec], inside: Arrays, scale: float) -> dict[str, Array]:
    """Return a graph's inputs from results of `layers`: embeddings, which are scaled, and hidden states."""
    count = sum(name.startswith("hidden.") for name in inside)
    states = [inside[f"hidden.{layer}"] for layer in range(count)]  # each (B, T, E)
    embeddings = {"embeddings": states[0], **inside} if states else inside  # where nothing is between the two
    inputs: dict[str, Array] = {}
    for spec in specs:
        if spec.name == "hidden" and len(spec.axes) == 3:
            inputs["hidden"] = np.stack(states)[:, 0]
        elif spec.name == "hidden":
            flat = np.stack(states).reshape(-1, states[0].shape[-1])
            inputs["hidden"] = flat[list(choose_evenly(len(flat), MAX_STATES))]
        elif spec.name in embeddings:
            inputs[spec.name] = embeddings[spec.name] * np.float32(scale)
    return inputs


def find_ties(model: nn.Module, recipe: Recipe, inputs: Arrays) -> tuple[Array, Array, Array]:
    """Return the lowest and highest rank (N, K) that each token may have, given the rounding of logits.

    And of the likeliest tokens (N, 10) whether each is clear: no other may change places with it.
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
    most = min(LENS_TOKENS + 1, logits.shape[1])
    order = -np.sort(np.partition(-logits, most - 1, axis=1)[:, :most], axis=1)  # the largest first
    apart = np.pad(-np.diff(order) > near, [(0, 0), (1, 1)], constant_values=True)  # (N, most + 1)
    is_clear = apart[:, :-1] & apart[:, 1:]
    return above, np.maximum(above, level), is_clear[:, :LENS_TOKENS]


def widen(case: ExplanationCase, model: nn.Module, recipe: Recipe) -> ExplanationCase:
    """Widen the limits of outputs that rounding to fp32 moves far from float64, and return the case.

    What is not finite in float64 keeps its limit.
    """
    own = {n: limit for n, limit in limit_by_rounding(case, model, recipe).items() if math.isfinite(limit)}
    limits = {name: max(limit, own.get(name, 0.0)) for name, limit in case.limits.items()}
    return replace(case, limits=limits)


def limit_by_rounding(case: ExplanationCase, model: nn.Module, recipe: Recipe) -> dict[str, float]:
    """Return the limits of a case's outputs, by how far rounding to fp32 moves them from float64.

    PyTorch in fp32 is one sample of it, of this processor's order of adding; others are sampled.
    """
    from .rounding import RoundInAnyOrder

    exact_model = copy.deepcopy(model).double()
    exact = compute(exact_model, recipe, case.inputs)
    samples: list[Arrays] = [case.outputs]
    for seed in range(ROUNDINGS):
        with RoundInAnyOrder(seed):
            samples.append(compute(exact_model, recipe, case.inputs))
    return {
        name: GAP_FACTOR * max(measure_distance(sample[name], exact[name], SMALLEST) for sample in samples)
        for name in exact
        if name not in INTEGERS
    }
