"""Checks that a loaded plan is the one that its entry in manifest.json describes.

The sha256 of a plan's file says that the file is the listed one. It does not say that the listed one was
built from this bundle's graph: that is read from the plan itself, before its first step.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..bundle.artifact import Artifact, Axis, TensorSpec
from ..bundle.bundle import Bundle
from ..bundle.plan import Plan, network_name
from ..errors import BackendError, IntegrityError
from .passport import rebuild_command
from .tensorrt_library import NUMPY_TYPES

NAME_START = "planforge "  # what every name that `network_name` gives begins with


def check_engine(trt: Any, engine: Any, bundle: Bundle, plan: Plan, artifact: Artifact) -> None:
    """Refuse an engine, just loaded, that was not built from what its manifest entry says.

    Args:
        artifact: what the plan takes, as `Plan.narrow_artifact` gives it.

    Raises:
        IntegrityError: it was built from another graph, or for other shapes; names both.
        BackendError: it does not say what it was built from, as plans of earlier versions.
    """
    hashes = {name: entry.sha256 for name, entry in bundle.manifest.files.items()}
    expected = network_name(bundle.manifest.artifact(plan.built_from), hashes)
    actual = str(engine.name)
    again = f"build it again: {rebuild_command(bundle, plan.engine, plan=plan)}"
    if not actual.startswith(NAME_START):
        raise BackendError(
            f"{plan.file} does not say which graph it was built from ({actual!r}), as plans of an earlier"
            f" PlanForge; {again}"
        )
    if actual != expected:
        raise IntegrityError(
            f"{bundle.folder}: {plan.file} is the plan of another graph: it was built from {actual!r}, this"
            f" bundle's is {expected!r}; {again}"
        )
    if problems := tensor_problems(trt, engine, plan, artifact):
        raise IntegrityError(
            f"{bundle.folder}: {plan.file} is not as manifest.json describes it: {problems[0]}; {again}"
        )


def tensor_problems(trt: Any, engine: Any, plan: Plan, artifact: Artifact) -> list[str]:
    """Return how an engine's tensors and profiles differ from its manifest entry, a line each."""
    weights = [TensorSpec(w.name, "weight", w.dtype, w.shape) for w in plan.weights]
    inputs = {spec.name: spec for spec in (*artifact.inputs, *weights)}
    outputs = {spec.name: spec for spec in artifact.outputs}
    names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
    taken = {name for name in names if engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT}
    problems = name_problems("input", taken, inputs)
    problems += name_problems("output", set(names) - taken, outputs)
    if problems:
        return problems
    for name, spec in {**inputs, **outputs}.items():
        problems += [f"{name!r} {problem}" for problem in type_and_shape_problems(engine, spec)]
    if engine.num_optimization_profiles != len(plan.profiles):
        problems.append(
            f"it has {engine.num_optimization_profiles} profiles, listed are {len(plan.profiles)}"
        )
        return problems
    for index, profile in enumerate(plan.profiles):
        for spec in artifact.inputs:
            problems += profile_problems(engine, index, profile["axes"], spec)
    return problems


def name_problems(side: str, found: Iterable[str], meant: Iterable[str]) -> list[str]:
    """Return which tensors an engine has that it should not have, and which it lacks."""
    missing = sorted(set(meant) - set(found))
    unknown = sorted(set(found) - set(meant))
    problems = [f"it has no {side} {name!r}" for name in missing]
    return problems + [f"it has an {side} {name!r}, which is not listed" for name in unknown]


def type_and_shape_problems(engine: Any, spec: TensorSpec) -> list[str]:
    """Return how one tensor's type and shape differ.

    TensorRT 8 takes int64 as int32. An axis is compared only where both sides give a number.
    """
    problems = []
    name = engine.get_tensor_dtype(spec.name).name
    found = str(NUMPY_TYPES.get(name, name))
    if found != spec.dtype and (found, spec.dtype) != ("int32", "int64"):
        problems.append(f"is {found}, listed is {spec.dtype}")
    shape = tuple(int(length) for length in engine.get_tensor_shape(spec.name))
    fixed = tuple(axis if isinstance(axis, int) else -1 for axis in spec.axes)
    if len(shape) != len(fixed) or any(
        a != b and -1 not in (a, b) for a, b in zip(shape, fixed, strict=True)
    ):
        problems.append(f"has shape {shape}, listed is {fixed}")
    return problems


def profile_problems(engine: Any, index: int, axes: Any, spec: TensorSpec) -> list[str]:
    """Return how the lengths of one input in one profile differ from the manifest's."""
    shapes = engine.get_tensor_profile_shape(spec.name, index)
    found = [tuple(int(length) for length in shape) for shape in shapes]
    meant = [
        tuple(axes[axis.name][which] if isinstance(axis, Axis) else axis for axis in spec.axes)
        for which in range(3)
    ]
    if found == meant:
        return []
    return [f"{spec.name!r} has lengths {found} in profile {index}, listed are {meant}"]
