"""Checks, by the loaded plan itself, that it was built from what its entry in manifest.json says."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..bundle.artifact import Artifact, Axis, TensorSpec
from ..bundle.bundle import Bundle
from ..bundle.plan import Plan, make_network_name
from ..errors import BackendError, IntegrityError
from .plan_compatibility import make_rebuild_command
from .tensorrt_library import NUMPY_TYPES

NAME_START = "planforge "  # what every name that `make_network_name` gives begins with


def check_engine(trt: Any, engine: Any, bundle: Bundle, plan: Plan, artifact: Artifact) -> None:
    """Refuse an engine, just loaded, that was built from another graph, or for other shapes.

    The artifact is what the plan takes, as `Plan.narrow_artifact` gives it.
    """
    hashes = {name: entry.sha256 for name, entry in bundle.manifest.files.items()}
    expected = make_network_name(bundle.manifest.artifact(plan.built_from), hashes)
    actual = str(engine.name)
    again = f"build it again: {make_rebuild_command(bundle, plan.engine, plan=plan)}"
    if not actual.startswith(NAME_START):
        raise BackendError(
            f"{plan.file} does not say which graph it was built from ({actual!r}); an earlier PlanForge may"
            f" have built it; {again}"
        )
    if actual != expected:
        raise IntegrityError(
            f"{bundle.folder}: {plan.file} was built from another graph: {actual!r}, but this bundle has"
            f" {expected!r}; {again}"
        )
    if problems := find_problems(trt, engine, plan, artifact):
        raise IntegrityError(
            f"{bundle.folder}: {plan.file} is not as manifest.json describes it: {problems[0]}; {again}"
        )


def find_problems(trt: Any, engine: Any, plan: Plan, artifact: Artifact) -> list[str]:
    """Return how an engine's tensors and profiles differ from its manifest entry, a line each."""
    weights = [TensorSpec(w.name, "weight", w.dtype, w.shape) for w in plan.weights]
    inputs = {spec.name: spec for spec in (*artifact.inputs, *weights)}
    outputs = {spec.name: spec for spec in artifact.outputs}
    names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
    taken = {name for name in names if engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT}
    problems = compare_names("input", taken, inputs)
    problems += compare_names("output", set(names) - taken, outputs)
    if problems:
        return problems
    for name, spec in {**inputs, **outputs}.items():
        problems += [f"{name!r} {problem}" for problem in compare_type_and_shape(engine, spec)]
    if engine.num_optimization_profiles != len(plan.profiles):
        problems.append(
            f"it has {engine.num_optimization_profiles} profiles, listed are {len(plan.profiles)}"
        )
        return problems
    for index, profile in enumerate(plan.profiles):
        for spec in artifact.inputs:
            problems += compare_profile(engine, index, profile["axes"], spec)
    return problems


def compare_names(side: str, actual: set[str], meant: Iterable[str]) -> list[str]:
    """Return which tensors an engine has that it should not have, and which it lacks."""
    missing = sorted(set(meant) - actual)
    unknown = sorted(actual - set(meant))
    problems = [f"it has no {side} {name!r}" for name in missing]
    return problems + [f"it has an {side} {name!r}, which is not listed" for name in unknown]


def compare_type_and_shape(engine: Any, spec: TensorSpec) -> list[str]:
    """Return how one tensor's type and shape differ; of an axis, where both sides give a number."""
    problems = []
    name = engine.get_tensor_dtype(spec.name).name
    dtype = str(NUMPY_TYPES.get(name, name))
    if dtype != spec.dtype and (dtype, spec.dtype) != ("int32", "int64"):  # which TensorRT 8 makes of it
        problems.append(f"is {dtype}, listed is {spec.dtype}")
    shape = tuple(int(length) for length in engine.get_tensor_shape(spec.name))
    fixed = tuple(axis if isinstance(axis, int) else -1 for axis in spec.axes)
    if len(shape) != len(fixed) or any(
        a != b and -1 not in (a, b) for a, b in zip(shape, fixed, strict=True)
    ):
        problems.append(f"has shape {shape}, listed is {fixed}")
    return problems


def compare_profile(engine: Any, index: int, axes: Any, spec: TensorSpec) -> list[str]:
    """Return how the lengths of one input in one profile differ from the manifest's."""
    shapes = engine.get_tensor_profile_shape(spec.name, index)
    actual = [tuple(int(length) for length in shape) for shape in shapes]
    meant = [
        tuple(axes[axis.name][which] if isinstance(axis, Axis) else axis for axis in spec.axes)
        for which in range(3)
    ]
    if actual == meant:
        return []
    return [f"{spec.name!r} has lengths {actual} in profile {index}, listed are {meant}"]
