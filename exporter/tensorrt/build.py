"""Builds a TensorRT plan from an ONNX graph, in a child process of its own.

The native library may abort, and holds the weights several times: a child that dies is an error
here, and its memory goes with it. Neither process loads torch.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from ...runtime.backends.tensorrt_library import (
    LIBRARIES,
    import_library,
    is_installed,
    make_logger,
    not_installed,
)
from ...runtime.bundle.bundle import sha256_of
from ...runtime.bundle.manifest import Artifact, Plan
from ...runtime.errors import BackendUnavailableError, PlanForgeError
from ..child import command_of
from ..errors import BuildError, OutputError
from .log import FATAL_WARNING, build_errors, check_network, in_words, parse_errors
from .profiles import SLOTS, Profile, add_profile, check_profile, slots_of

logger = logging.getLogger(__name__)


CHILD = tuple(command_of(f"{__package__}.build"))
ERRORS = {kind.__name__: kind for kind in (BuildError, OutputError, BackendUnavailableError)}

RTX_MAGIC = b"vtrt"

# Inputs that the parser passes over in silence, as if the graph did not have them.
IGNORED_INPUTS = {("Attention", 6): "nonpad_kv_seqlen"}


@dataclass(frozen=True)
class PlanReport:
    """What was built, by what, and for which GPUs."""

    engine: str
    version: str
    sms: tuple[str, ...]
    bytes: int
    seconds: float
    profiles: tuple[Profile, ...]
    warnings: tuple[str, ...] = ()

    def passport(self, built_from: str, file: str) -> Plan:
        """The plan's entry in a bundle's manifest.

        Args:
            built_from: the id of the artifact.
            file: where the plan lies in the bundle.
        """
        profiles = tuple(profile.to_json() for profile in self.profiles)
        cuda = LIBRARIES[self.engine].cuda
        return Plan(built_from, file, self.engine, self.version, self.sms, profiles, cuda)


def build_plan(
    onnx: Path,
    artifact: Artifact,
    *,
    engine: str = "tensorrt-rtx",
    sms: Sequence[str] = (),
    profiles: Sequence[Profile],
    out: Path,
) -> PlanReport:
    """Builds one plan for all of `sms`.

    Args:
        onnx: the graph, its weights beside it. The folder is only read.
        artifact: what the graph's inputs, outputs and aliases must be.
        engine: "tensorrt-rtx", which builds without a GPU, or "tensorrt", which builds for the GPU
            that is present.
        sms: compute capabilities, as "sm86". "tensorrt" takes none, or the present one.
        profiles: from `profiles_for`.
        out: where the plan goes. What lies there is replaced when the plan is complete, not before.

    Raises:
        BuildError: TensorRT refused the graph or a profile, or its process died.
        BackendUnavailableError: the engine is not installed, or needs a GPU.
        OutputError: the plan cannot be written.
    """
    sms = checked_target(engine, sms)
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
    }
    started = time.perf_counter()
    try:
        answer = answer_of_child(request)
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
        tuple(profiles),
        tuple(answer["warnings"]),
    )


def checked_target(engine: str, sms: Sequence[str]) -> list[str]:
    """The wanted compute capabilities, each once, if the engine is here and can build for them."""
    if engine not in LIBRARIES:
        raise BuildError(f"engine {engine!r} is not one of {sorted(LIBRARIES)}")
    wanted = list(dict.fromkeys(sm.lower() for sm in sms))
    allowed = LIBRARIES[engine].sms
    unknown = [sm for sm in wanted if allowed and sm not in allowed]
    if unknown:
        raise BuildError(
            f"{engine} builds no plans for {', '.join(unknown)}, only for {', '.join(allowed)};"
            " for another GPU use --engine tensorrt on the machine that has it"
        )
    if allowed and not wanted:
        raise BuildError(f"{engine} needs the GPUs to build for: some of {', '.join(allowed)}")
    if not is_installed(engine):
        raise not_installed(engine)
    return wanted


def answer_of_child(request: Mapping[str, Any]) -> dict[str, Any]:
    """Runs the build in a child process. An interrupt here kills the child."""
    with tempfile.TemporaryDirectory(prefix="planforge-build-") as folder:
        files = [Path(folder, "request.json"), Path(folder, "answer.json")]
        files[0].write_text(json.dumps(request), encoding="utf-8")
        child = subprocess.run(
            [*CHILD, *map(str, files)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
        )
        if child.returncode != 0 or not files[1].exists():
            raise BuildError(f"{request['engine']} died while building {request['onnx']}: {end_of(child)}")
        answer: dict[str, Any] = json.loads(files[1].read_text(encoding="utf-8"))
    if "error" in answer:
        raise ERRORS[answer["error"]](answer["message"])
    return answer


def end_of(child: subprocess.CompletedProcess[str]) -> str:
    """How a child ended: the signal or exit code, and the last line it printed."""
    lines = child.stdout.strip().splitlines()
    said = f", its last words: {lines[-1].strip()}" if lines else ""
    if child.returncode >= 0:
        return f"exit code {child.returncode}{said}"
    name = signal.Signals(-child.returncode).name
    hint = " (out of memory?)" if name == "SIGKILL" else ""
    return f"signal {name}{hint}{said}"


def main(arguments: Sequence[str]) -> None:
    """The child process: answers a request, with a report or with an error in words."""
    request = json.loads(Path(arguments[0]).read_text(encoding="utf-8"))
    try:
        answer = build_in_this_process(request)
    except PlanForgeError as error:
        answer = {"error": type(error).__name__, "message": str(error)}
    Path(arguments[1]).write_text(json.dumps(answer), encoding="utf-8")


def build_in_this_process(request: Mapping[str, Any]) -> dict[str, Any]:
    """Parses, checks and builds what a request asks for."""
    trt = engine_module(request["engine"])
    artifact = Artifact.from_json(request["artifact"])
    profiles = [Profile.from_json(value) for value in request["profiles"]]
    slots = slots_of(profiles)
    log = make_logger(trt)
    sms = request["sms"] if LIBRARIES[request["engine"]].sms else [present_sm(request["sms"])]

    builder = trt.Builder(log)
    strongly_typed = getattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)
    network = builder.create_network(0 if strongly_typed is None else 1 << int(strongly_typed))
    parser = trt.OnnxParser(network, log)  # owns the weights until the plan is built
    if not parser.parse(frozen_graph(Path(request["onnx"]), slots), request["onnx"]):
        raise BuildError(parse_errors(parser, log.errors))
    check_network(network, artifact, slots)
    allow_decomposed_attention(trt, network)

    config = builder.create_builder_config()
    config.clear_flag(trt.BuilderFlag.TF32)  # fp32 means fp32: precision is in the graph
    for profile in profiles:
        if not add_profile(builder, config, profile, artifact):
            why = build_errors(log.errors)
            raise BuildError(f"TensorRT refuses profile {profile.name!r} of {profile.axes}: {why}")
    if LIBRARIES[request["engine"]].sms:
        set_compute_capabilities(trt, config, sms)
    write_plan(trt, builder, network, config, Path(request["out"]), log)
    warnings = dict.fromkeys(in_words(warning) for warning in log.warnings)
    return {"version": trt.__version__, "sms": sms, "warnings": list(warnings)}


def engine_module(engine: str) -> Any:
    """The engine's Python module, if it is there and new enough."""
    trt = import_library(engine)
    if engine == "tensorrt" and int(trt.__version__.split(".")[0]) < 10:
        raise BackendUnavailableError(
            f"tensorrt {trt.__version__} ignores the precisions that a graph names;"
            " PlanForge needs 10 or newer: pip install 'planforge[tensorrt]'"
        )
    return trt


def present_sm(wanted: Sequence[str]) -> str:
    """The compute capability of the first GPU, asked of the driver."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    try:
        cuda = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
        failed = (
            cuda.cuInit(0)
            or cuda.cuDeviceGetAttribute(ctypes.byref(major), 75, 0)  # ..._COMPUTE_CAPABILITY_MAJOR
            or cuda.cuDeviceGetAttribute(ctypes.byref(minor), 76, 0)  # ..._COMPUTE_CAPABILITY_MINOR
        )
    except OSError:
        failed = True
    if failed:
        raise BackendUnavailableError(
            "engine 'tensorrt' builds for the GPU that is present, and here is none;"
            " --engine tensorrt-rtx builds without a GPU"
        )
    sm = f"sm{major.value}{minor.value}"
    if list(wanted) not in ([], [sm]):
        raise BuildError(f"engine 'tensorrt' builds for this machine's {sm} only, not {', '.join(wanted)}")
    return sm


def frozen_graph(path: Path, slots: int | None) -> bytes:
    """The ONNX file with its slots axis as a number; the weights stay where they are."""
    import onnx

    try:
        model = onnx.load(path, load_external_data=False)
    except Exception as error:  # OSError, or protobuf's own, which is no ValueError
        raise BuildError(f"{path} cannot be read as ONNX: {error}") from error
    for node in model.graph.node:
        for (operator, index), name in IGNORED_INPUTS.items():
            if node.op_type == operator and len(node.input) > index and node.input[index]:
                raise BuildError(
                    f"ONNX node {node.name!r} ({operator}): TensorRT ignores its input {name}"
                    f" ({node.input[index]!r}) and would compute something else; use a mask"
                )
    if slots is not None:
        for value in [*model.graph.input, *model.graph.output, *model.graph.value_info]:
            for dim in value.type.tensor_type.shape.dim:
                if dim.dim_param == SLOTS:
                    dim.dim_value = slots
    return bytes(model.SerializeToString())


def allow_decomposed_attention(trt: Any, network: Any) -> None:
    """Lets attention run as several kernels where a GPU has no fused one; else there is no plan."""
    for i in range(network.num_layers):
        layer = network.get_layer(i)
        if layer.type.name == "ATTENTION_INPUT":
            layer.__class__ = trt.IAttentionInputLayer  # get_layer returns the base class
            layer.attention.decomposable = True


def set_compute_capabilities(trt: Any, config: Any, sms: Sequence[str]) -> None:
    """Names the GPUs to build for, which need not be present."""
    config.num_compute_capabilities = len(sms)
    for index, sm in enumerate(sms):
        capability = getattr(trt.ComputeCapability, sm.upper(), None)
        if capability is None:
            raise BuildError(f"{trt.__name__} {trt.__version__} is too old for {sm}")
        config.set_compute_capability(capability, index)


def write_plan(trt: Any, builder: Any, network: Any, config: Any, path: Path, log: Any) -> None:
    """Builds the plan straight into a file, where this TensorRT can: it is held once less."""
    try:
        with path.open("wb") as file:
            if hasattr(builder, "build_serialized_network_to_stream"):
                writer = plan_writer(trt, file)
                built = builder.build_serialized_network_to_stream(network, config, writer)
                if writer.error:
                    raise writer.error
            else:
                plan = builder.build_serialized_network(network, config)
                built = plan is not None
                if built:
                    file.write(plan)
    except OSError as error:
        raise OutputError(f"cannot write the plan {path}: {error.strerror}") from error
    if not built:
        raise BuildError(f"TensorRT builds no plan: {build_errors(log.errors)}")
    if fatal := [warning for warning in log.warnings if FATAL_WARNING.search(warning)]:
        raise BuildError(f"the plan would fail while running: {build_errors(fatal)}")


def plan_writer(trt: Any, file: BinaryIO) -> Any:
    """An `IStreamWriter` into a file. It keeps the error, which TensorRT would pass over."""

    class Writer(trt.IStreamWriter):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IStreamWriter.__init__(self)
            self.error: OSError | None = None

        def write(self, data: bytes) -> int:
            if self.error is None:
                try:
                    file.write(data)
                except OSError as error:
                    self.error = error
            return len(data)

    return Writer()


def plan_summary(path: Path) -> dict[str, Any]:
    """What a plan file says of itself to a reader without TensorRT, driver or GPU.

    TensorRT-RTX's header was read in plans of 1.4.0.76, 1.6.1.120 and 1.7.1.116: bytes 0..3 "vtrt",
    16..23 the plan's length, 24..27 the version. What another header means is not claimed here.

    Returns:
        "bytes", "sha256" and "magic" of every file; "engine", "version" and "complete" of a plan of
        TensorRT-RTX, which is complete when it is as long as its header says.
    """
    with path.open("rb") as file:
        header = file.read(28)
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
    return summary
