"""Builds a TensorRT plan from an ONNX graph, in a child process of its own.

The native library may abort, and holds the weights several times: a child that dies is an error
here, and its memory is freed with it. Neither process loads torch.
"""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...runtime.backends.architectures import describe_sms, find_sm, suggest_series
from ...runtime.backends.tensorrt_library import LIBRARIES, is_installed, make_library_error
from ...runtime.bundle.bundle import Bundle, compute_sha256
from ...runtime.bundle.manifest import Artifact, Plan, PlanWeight
from ...runtime.bundle.plan import make_network_name
from ...runtime.errors import IntegrityError
from ...runtime.suggest import did_you_mean
from ..errors import BuildError, BuildOptionError, OutputError, make_named_error
from ..processes import make_command, run_child
from .candidates import check_candidates
from .profiles import Profile, check_profile, find_slots

logger = logging.getLogger(__name__)

CHILD = tuple(make_command(f"{__package__}.builder"))

RTX_MAGIC = b"vtrt"
PROFILING = ("layer_names_only", "none", "detailed")  # TensorRT's ProfilingVerbosity
BUILDER_LEVELS = range(6)
NETWORK_NAME = re.compile(rb"planforge [\w.-]+ [0-9a-f]{64}")  # see `make_network_name`
NAME_WITHIN = 2**20  # bytes: plans of TensorRT-RTX 1.7.1 have it at byte 516


@dataclass(frozen=True)
class Options:
    """Build options that a user may choose.

    Attributes:
        workspace: bytes that TensorRT may use while it tries kernels, and a plan while it runs.
        timing_cache: a file with what earlier builds measured; made if missing. Not for TensorRT-RTX.
        strip: leave out the large weights; the bundle's are bound when the plan is loaded.
        compatible: for Ampere and all later desktop and server GPUs, and for later versions of TensorRT;
            as a rule slower. Not for TensorRT-RTX, nor for Jetson.
        candidates: how many of the likeliest tokens the plan picks by itself; 0 for logits alone.
        opt: shapes that profiles are optimized for, such as {"batch": 8, "length": 128}, a set for each.
        builder_level: how long TensorRT searches for kernels, 0 to 5; by default its own, 3. Not before 8.6.
        profiling: what the plan keeps of its layers, one of `PROFILING`; by default their names. "detailed"
            adds types, formats and ONNX nodes, which `planforge inspect --layers` shows. What TensorRT-RTX
            tells of them as it builds is kept beside the plan, to be read without a GPU.
        max_memory: bytes on the GPU; a plan whose estimate is larger is refused before it is built.
    """

    workspace: int | None = None
    timing_cache: str | None = None
    strip: bool = False
    compatible: bool = False
    candidates: int = 0
    opt: Sequence[Mapping[str, int]] = ()
    builder_level: int | None = None
    profiling: str | None = None
    max_memory: int | None = None


USUAL = Options()


@dataclass(frozen=True)
class PlanRequest:
    """One plan to build, for all of `sms`."""

    onnx: Path  # the graph, with its weights next to it
    artifact: Artifact  # what the graph's inputs, outputs and aliases must be
    profiles: Sequence[Profile]
    out: Path  # what lies there is replaced when the plan is complete, not before
    engine: str = "tensorrt-rtx"  # builds without a GPU; "tensorrt" builds for the one that is present
    sms: Sequence[str] = ()  # as `find_sm` takes them; "tensorrt" takes none, or the present one
    options: Options = USUAL
    release: tuple[int, int] | None = None  # the TensorRT that the graph was chosen for, but for its minor
    name: str = ""  # of the network, from `make_network_name`: the runtime wants it of a bundle's plan


def build_plan(request: PlanRequest) -> Plan:
    """Build a plan and return its entry, as of a file in a bundle's plans/."""
    options = request.options
    out = request.out
    sms = resolve_architectures(request.engine, request.sms)
    check_build_options(request.engine, options)
    if options.candidates:
        check_candidates(request.artifact, options.candidates)
    if not request.profiles:
        raise BuildError("a plan needs at least one profile")
    for profile in request.profiles:
        check_profile(profile, request.artifact)
    find_slots(request.profiles)  # refuses more than one length
    partial = out.with_name(f".{out.name}.partial")
    try:
        answer = build_in_child(
            {
                "onnx": str(request.onnx.resolve()),
                "artifact": request.artifact.to_json(),
                "engine": request.engine,
                "sms": sms,
                "profiles": [profile.to_json() for profile in request.profiles],
                "out": str(partial.resolve()),
                "options": asdict(options),
                "release": request.release,
                "name": request.name,
            }
        )
        try:
            os.replace(partial, out)
        except OSError as error:
            raise OutputError(f"cannot write {out}: {error.strerror}") from error
    finally:
        partial.unlink(missing_ok=True)
    layers = write_layers(out, answer["layers"])
    for warning in answer["warnings"]:
        logger.warning("%s: %s", request.artifact.id, warning)
    return Plan(
        built_from=request.artifact.id,
        file=f"plans/{out.name}",
        engine=request.engine,
        version=answer["version"],
        sms=tuple(answer["sms"]),
        profiles=tuple(answer["profiles"]),
        cuda=answer["cuda"],
        weights=tuple(PlanWeight.from_json(weight) for weight in answer["weights"]),
        compatible=options.compatible,
        candidates=options.candidates,
        builder_level=options.builder_level,
        profiling=options.profiling,
        layers=layers,
    )


def write_layers(out: Path, layers: Sequence[Mapping[str, Any]]) -> str | None:
    """Write the layers of the plan `out` beside it, as an engine inspector tells them.

    Return the file's name in a bundle, None where nothing is known of the layers.
    """
    if not layers:
        return None
    path = out.with_suffix(".layers.json")
    try:
        path.write_text(json.dumps({"Layers": layers}, indent=1), encoding="utf-8")
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror}") from error
    return f"plans/{path.name}"


def resolve_architectures(engine: str, sms: Sequence[str]) -> list[str]:
    """Return the wanted compute capabilities, each once; refuse those that cannot be built for here."""
    if engine not in LIBRARIES:
        known = sorted(LIBRARIES)
        raise BuildOptionError(f"engine {engine!r} is not one of {known}{did_you_mean(engine, known)}")
    wanted = list(dict.fromkeys(map(find_sm, sms)))
    allowed = LIBRARIES[engine].sms
    unknown = [sm for sm in wanted if allowed and sm not in allowed]
    if unknown:
        hint = suggest_series(unknown[0]) or (
            "; for another GPU use --target tensorrt on the machine that has it"
        )
        raise BuildOptionError(
            f"{engine} builds no plans for {describe_sms(unknown)}, only for {describe_sms(allowed)}{hint}"
        )
    if allowed and not wanted:
        raise BuildOptionError(f"{engine} needs the GPUs to build for: some of {describe_sms(allowed)}")
    if not is_installed(engine):
        raise make_library_error(engine)
    return wanted


def check_build_options(engine: str, options: Options) -> None:
    """Refuse options that the engine does not support, and values that an option cannot have."""
    level = options.builder_level
    if level is not None and (isinstance(level, bool) or level not in BUILDER_LEVELS):
        raise BuildOptionError(f"--builder-level {level} is not one of {', '.join(map(str, BUILDER_LEVELS))}")
    if options.profiling is not None and options.profiling not in PROFILING:
        hint = did_you_mean(options.profiling, PROFILING)
        raise BuildOptionError(f"--profiling {options.profiling} is not one of {', '.join(PROFILING)}{hint}")
    if engine == "tensorrt-rtx" and options.timing_cache is not None:
        raise BuildOptionError(
            "TensorRT-RTX uses no timing cache, as it compiles its kernels where the plan runs: leave out"
            " --timing-cache"
        )
    if engine == "tensorrt-rtx" and options.compatible:
        raise BuildOptionError(
            "a TensorRT-RTX plan runs on every GPU that it was built for: leave out --compatible, and choose"
            " the GPUs with --sm"
        )


def build_in_child(request: Mapping[str, Any]) -> dict[str, Any]:
    """Run the build in a child process and return its answer. An interrupt here kills the child."""
    with tempfile.TemporaryDirectory(prefix="planforge-build-") as folder:
        files = [Path(folder, "request.json"), Path(folder, "answer.json")]
        debug = logger.isEnabledFor(logging.DEBUG)
        files[0].write_text(json.dumps({**request, "debug": debug}), encoding="utf-8")
        child = run_child(
            [*CHILD, *map(str, files)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=None if debug else subprocess.STDOUT,  # TensorRT's own log, as it is written
            encoding="utf-8",
            errors="replace",
        )
        if child.returncode != 0 or not files[1].exists():
            end = describe_end(child)
            raise BuildError(f"{request['engine']} died while building {request['onnx']}: {end}")
        answer: dict[str, Any] = json.loads(files[1].read_text(encoding="utf-8"))
    if "error" in answer:
        raise make_named_error(answer["error"], answer["message"])
    return answer


def describe_end(child: subprocess.CompletedProcess[str]) -> str:
    """Return how a child ended: the signal or exit code, and the last line it printed."""
    lines = child.stdout.strip().splitlines()
    said = f", its last words: {lines[-1].strip()}" if lines else ""
    if child.returncode >= 0:
        return f"exit code {child.returncode}{said}"
    name = signal.Signals(-child.returncode).name
    hint = " (out of memory?)" if name == "SIGKILL" else ""
    return f"signal {name}{hint}{said}"


def check_plan_names(bundle: Bundle) -> None:
    """Refuse plans that were built from another graph than listed, where their bytes say so without a GPU."""
    manifest = bundle.manifest
    hashes = {name: entry.sha256 for name, entry in manifest.files.items()}
    for plan in manifest.plans:
        with bundle.locate(plan.file).open("rb") as file:
            match = NETWORK_NAME.search(file.read(NAME_WITHIN))
        expected = make_network_name(manifest.artifact(plan.built_from), hashes)
        if match is not None and match[0].decode() != expected:
            raise IntegrityError(
                f"{bundle.folder}: {plan.file} is the plan of another graph: it was built from"
                f" {match[0].decode()!r}, this bundle's is {expected!r}; build it again"
            )


def summarize_plan(path: Path) -> dict[str, Any]:
    """Return the facts that a plan file shows without TensorRT, driver or GPU.

    TensorRT-RTX's header was read in plans of 1.4.0.76, 1.6.1.120 and 1.7.1.116: bytes 0..3 "vtrt",
    16..23 the plan's length, 24..27 the version. What another header means is not claimed here.
    """
    with path.open("rb") as file:
        beginning = file.read(NAME_WITHIN)
    size = path.stat().st_size
    summary: dict[str, Any] = {
        "bytes": size,
        "sha256": compute_sha256(path),
        "magic": beginning[:4].decode("ascii", errors="backslashreplace"),
    }
    if beginning.startswith(RTX_MAGIC) and size >= 28:
        summary["engine"] = "tensorrt-rtx"
        summary["version"] = ".".join(str(byte) for byte in beginning[24:28])
        summary["complete"] = size == int.from_bytes(beginning[16:24], "little")
    if match := NETWORK_NAME.search(beginning):
        summary["network"] = match[0].decode()
    return summary
