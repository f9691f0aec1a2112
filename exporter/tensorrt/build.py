"""Builds a TensorRT plan from an ONNX graph, in a child process of its own.

The native library may abort, and holds the weights several times: a child that dies is an error
here, and its memory goes with it. Neither process loads torch.
"""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...runtime.backends.tensorrt_library import LIBRARIES, is_installed, missing_library_error
from ...runtime.bundle.bundle import Bundle, sha256_of
from ...runtime.bundle.manifest import Artifact, Plan, PlanWeight
from ...runtime.bundle.plan import network_name
from ...runtime.errors import IntegrityError
from ...runtime.suggest import did_you_mean
from ..errors import BuildError, BuildOptionError, OutputError, error_from_name
from ..processes import command_of, run_child
from .candidates import check_candidates
from .profiles import Profile, check_profile, slots_of

logger = logging.getLogger(__name__)


CHILD = tuple(command_of(f"{__package__}.builder"))

RTX_MAGIC = b"vtrt"
NETWORK_NAME = re.compile(rb"planforge [\w.-]+ [0-9a-f]{64}")  # see `network_name`
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
    """

    workspace: int | None = None
    timing_cache: str | None = None
    strip: bool = False
    compatible: bool = False
    candidates: int = 0


USUAL = Options()


@dataclass(frozen=True)
class PlanReport:
    """What was built, with which library, and for which GPUs."""

    engine: str
    version: str
    sms: tuple[str, ...]
    bytes: int
    seconds: float
    profiles: tuple[Profile, ...]
    cuda: str
    options: Options
    weights: tuple[PlanWeight, ...] = ()
    warnings: tuple[str, ...] = ()

    def passport(self, built_from: str, file: str) -> Plan:
        """Return the plan's entry in a bundle's manifest.

        Args:
            built_from: the id of the artifact.
            file: where the plan lies in the bundle.
        """
        profiles = tuple(profile.to_json() for profile in self.profiles)
        return Plan(
            built_from,
            file,
            self.engine,
            self.version,
            self.sms,
            profiles,
            cuda=self.cuda,
            weights=self.weights,
            compatible=self.options.compatible,
            candidates=self.options.candidates,
        )


def build_plan(
    onnx: Path,
    artifact: Artifact,
    *,
    engine: str = "tensorrt-rtx",
    sms: Sequence[str] = (),
    profiles: Sequence[Profile],
    out: Path,
    options: Options = USUAL,
    release: tuple[int, int] | None = None,
    name: str = "",
) -> PlanReport:
    """Build one plan for all of `sms`.

    Args:
        onnx: the graph, its weights beside it. The folder is only read.
        artifact: what the graph's inputs, outputs and aliases must be.
        engine: "tensorrt-rtx", which builds without a GPU, or "tensorrt", which builds for the GPU
            that is present.
        options: how to build it.
        release: the version of TensorRT that the graph was chosen for; another major version is refused.
        sms: compute capabilities, as "sm86". "tensorrt" takes none, or the present one.
        profiles: from `profiles_for`.
        out: where the plan goes. What lies there is replaced when the plan is complete, not before.
        name: the network's name, from `network_name`; the runtime loads no plan of a bundle without it.

    Raises:
        BuildError: TensorRT refused the graph or a profile, or its process died.
        BackendUnavailableError: the engine is not installed, or needs a GPU.
        OutputError: the plan cannot be written.
    """
    sms = resolve_architectures(engine, sms)
    check_build_options(engine, options)
    if options.candidates:
        check_candidates(artifact, options.candidates)
    if not profiles:
        raise BuildError("a plan needs at least one profile")
    for profile in profiles:
        check_profile(profile, artifact)
    slots_of(profiles)
    partial = out.with_name(f".{out.name}.partial")
    request = {
        "onnx": str(onnx.resolve()),
        "artifact": artifact.to_json(),
        "engine": engine,
        "sms": sms,
        "profiles": [profile.to_json() for profile in profiles],
        "out": str(partial.resolve()),
        "options": asdict(options),
        "release": release,
        "name": name,
    }
    started = time.perf_counter()
    try:
        answer = build_in_child(request)
        try:
            os.replace(partial, out)
        except OSError as error:
            raise OutputError(f"cannot write {out}: {error.strerror}") from error
    finally:
        partial.unlink(missing_ok=True)
    for warning in answer["warnings"]:
        logger.warning("%s: %s", artifact.id, warning)
    return PlanReport(
        engine,
        answer["version"],
        tuple(answer["sms"]),
        out.stat().st_size,
        time.perf_counter() - started,
        tuple(Profile.from_json(profile) for profile in answer["profiles"]),
        answer["cuda"],
        options,
        tuple(PlanWeight.from_json(weight) for weight in answer["weights"]),
        tuple(answer["warnings"]),
    )


def resolve_architectures(engine: str, sms: Sequence[str]) -> list[str]:
    """Return the wanted compute capabilities, each once; refuse what the engine cannot build for here."""
    if engine not in LIBRARIES:
        known = sorted(LIBRARIES)
        raise BuildOptionError(f"engine {engine!r} is not one of {known}{did_you_mean(engine, known)}")
    wanted = list(dict.fromkeys(sm.lower() if not sm.isdecimal() else f"sm{sm}" for sm in sms))
    allowed = LIBRARIES[engine].sms
    unknown = [sm for sm in wanted if allowed and sm not in allowed]
    if unknown:
        raise BuildOptionError(
            f"{engine} builds no plans for {', '.join(unknown)}, only for {', '.join(allowed)};"
            " for another GPU use --target tensorrt on the machine that has it"
        )
    if allowed and not wanted:
        raise BuildOptionError(f"{engine} needs the GPUs to build for: some of {', '.join(allowed)}")
    if not is_installed(engine):
        raise missing_library_error(engine)
    return wanted


def check_build_options(engine: str, options: Options) -> None:
    """Refuse options that the engine does not support."""
    if engine == "tensorrt-rtx" and options.timing_cache is not None:
        raise BuildOptionError(
            "TensorRT-RTX times nothing while it builds, as it compiles its kernels where the plan runs:"
            " leave out --timing-cache"
        )
    if engine == "tensorrt-rtx" and options.compatible:
        raise BuildOptionError(
            "a plan of TensorRT-RTX runs on every GPU that it was built for by itself: instead of"
            " --compatible name them by --sm"
        )


def build_in_child(request: Mapping[str, Any]) -> dict[str, Any]:
    """Run the build in a child process and return its answer. An interrupt here kills the child."""
    with tempfile.TemporaryDirectory(prefix="planforge-build-") as folder:
        files = [Path(folder, "request.json"), Path(folder, "answer.json")]
        files[0].write_text(json.dumps(request), encoding="utf-8")
        child = run_child(
            [*CHILD, *map(str, files)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
        )
        if child.returncode != 0 or not files[1].exists():
            end = describe_end(child)
            raise BuildError(f"{request['engine']} died while building {request['onnx']}: {end}")
        answer: dict[str, Any] = json.loads(files[1].read_text(encoding="utf-8"))
    if "error" in answer:
        raise error_from_name(answer["error"], answer["message"])
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
    """Refuse plans that were built from another graph than listed, where their bytes say so without a GPU.

    Raises:
        IntegrityError: names both.
    """
    manifest = bundle.manifest
    hashes = {name: entry.sha256 for name, entry in manifest.files.items()}
    for plan in manifest.plans:
        with bundle.locate(plan.file).open("rb") as file:
            match = NETWORK_NAME.search(file.read(NAME_WITHIN))
        meant = network_name(manifest.artifact(plan.built_from), hashes)
        if match is not None and match[0].decode() != meant:
            raise IntegrityError(
                f"{bundle.folder}: {plan.file} is the plan of another graph: it was built from"
                f" {match[0].decode()!r}, this bundle's is {meant!r}; build it again"
            )


def plan_summary(path: Path) -> dict[str, Any]:
    """Return what can be read from a plan file without TensorRT, driver or GPU.

    TensorRT-RTX's header was read in plans of 1.4.0.76, 1.6.1.120 and 1.7.1.116: bytes 0..3 "vtrt",
    16..23 the plan's length, 24..27 the version. What another header means is not claimed here.

    Returns:
        "bytes", "sha256" and "magic" of every file; "engine", "version" and "complete" of a plan of
        TensorRT-RTX, which is complete when it is as long as its header says; "network" where PlanForge
        built it: the artifact it was built from, and what binds it to that one's bytes.
    """
    with path.open("rb") as file:
        beginning = file.read(NAME_WITHIN)
    header = beginning[:28]
    size = path.stat().st_size
    summary: dict[str, Any] = {
        "bytes": size,
        "sha256": sha256_of(path),
        "magic": header[:4].decode("ascii", errors="backslashreplace"),
    }
    if header[:4] == RTX_MAGIC and len(header) == 28:
        summary["engine"] = "tensorrt-rtx"
        summary["version"] = ".".join(str(byte) for byte in header[24:28])
        summary["complete"] = size == int.from_bytes(header[16:24], "little")
    if match := NETWORK_NAME.search(beginning):
        summary["network"] = match[0].decode()
    return summary
