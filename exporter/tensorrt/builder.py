"""The process that builds one plan: parses, checks and builds, with TensorRT's library loaded."""

from __future__ import annotations

import ctypes
import json
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from ...runtime.backends.tensorrt_library import LIBRARIES, import_library, make_logger
from ...runtime.bundle.artifact import SLOTS, Artifact, TensorSpec
from ...runtime.bundle.plan import PlanWeight
from ...runtime.errors import BackendUnavailableError, PlanForgeError
from ..errors import BuildError, OutputError
from .candidates import add_candidates
from .listing import read_listing
from .log import FATAL_WARNING, check_network, explain_build_errors, explain_parse_errors, translate_message
from .older import keep_types, rewrite_for_tensorrt_8
from .profiles import Profile, Range, find_slots

if TYPE_CHECKING:
    # Only functions import onnx: main() answers what is missing, so this module must load without it.
    from onnx import ModelProto

SMALLEST_TAKEN = 2**16  # bytes of a weight that a stripped plan leaves out
OLDEST = (8, 5)  # versions of TensorRT
FIRST_TYPED = (9, 0)

KEY_LENGTHS = 6  # the input of Attention that the parser ignores, as if the graph did not have it


def main(arguments: Sequence[str]) -> None:
    """Run the child process: read a request, build, and write a report or an error message."""
    request = json.loads(Path(arguments[0]).read_text(encoding="utf-8"))
    if request.get("debug"):
        logging.basicConfig(level=logging.DEBUG, format="%(message)s")
    try:
        answer = build_in_this_process(request)
    except PlanForgeError as error:
        answer = {"error": type(error).__name__, "message": str(error)}
    Path(arguments[1]).write_text(json.dumps(answer), encoding="utf-8")


def build_in_this_process(request: Mapping[str, Any]) -> dict[str, Any]:
    """Parse and check the graph of a request, and build its plan."""
    trt = import_engine(request["engine"], request["release"])
    artifact = Artifact.from_json(request["artifact"])
    profiles = [Profile.from_json(value) for value in request["profiles"]]
    slots = find_slots(profiles)
    log = make_logger(trt)
    library = LIBRARIES[request["engine"]]
    sms, cuda = (request["sms"], library.cuda) if library.sms else find_gpu(request["sms"])
    weak = request["engine"] == "tensorrt" and read_version(trt) < FIRST_TYPED

    builder = trt.Builder(log)
    kinds = trt.NetworkDefinitionCreationFlag
    kind = kinds.EXPLICIT_BATCH if weak else kinds.STRONGLY_TYPED  # TensorRT 8 has no typed networks
    network = builder.create_network(1 << int(kind))
    model = load_graph(Path(request["onnx"]), slots)
    weights = take_out_weights(model) if request["options"]["strip"] else []
    if count := request["options"].get("candidates"):
        add_candidates(model, artifact, count)
        artifact = artifact.add_candidates(count)
    types = rewrite_for_tensorrt_8(model, read_version(trt)) if weak else {}
    parser = trt.OnnxParser(network, log)  # owns the weights until the plan is built
    if not parser.parse(model.SerializeToString(), request["onnx"]):
        raise BuildError(explain_parse_errors(parser, log.errors))
    typed = use_int32_inputs(artifact) if weak else artifact
    weight_specs = [TensorSpec(w.name, "weight", w.dtype, w.shape) for w in weights]
    check_network(network, replace(typed, inputs=(*typed.inputs, *weight_specs)), slots)
    allow_decomposed_attention(trt, network)
    if request["name"]:
        network.name = request["name"]  # the plan keeps it

    config = builder.create_builder_config()
    set_options(trt, config, request["options"])
    if weak:
        config.set_flag(trt.BuilderFlag.FP16)
        config.set_flag(trt.BuilderFlag.OBEY_PRECISION_CONSTRAINTS)
        keep_types(trt, network, types)
    accepted = []
    for profile in profiles:
        added = add_profile(builder, config, profile, artifact)
        if added is None:
            why = explain_build_errors(log.errors)
            raise BuildError(f"TensorRT refuses profile {profile.name!r} of {profile.axes}: {why}")
        accepted.append(added.to_json())
    if library.sms:
        set_compute_capabilities(trt, config, sms)
    write_plan(trt, builder, network, config, Path(request["out"]), log)
    keep_timings(config, request["options"].get("timing_cache"))
    warnings = dict.fromkeys(translate_message(warning) for warning in log.warnings)
    listing = log.listing if request["options"].get("profiling") == "detailed" else ""
    layers = read_listing(listing)
    if listing and not layers:
        warnings["the list of its layers has a form that is not known, and is not kept"] = None
    sms = ["sm80+"] if request["options"].get("compatible") else sms
    return {
        "version": trt.__version__,
        "sms": sms,
        "cuda": cuda,
        "warnings": list(warnings),
        "profiles": accepted,
        "weights": [asdict(weight) for weight in weights],
        "layers": layers,
    }


def add_profile(builder: Any, config: Any, profile: Profile, artifact: Artifact) -> Profile | None:
    """Add a profile to a builder's config; return it as TensorRT has it, or None if it is refused."""
    added = builder.create_optimization_profile()
    for spec in artifact.inputs:
        added.set_shape(spec.name, *profile.list_shapes(spec))
    if config.add_optimization_profile(added) < 0:
        return None
    axes: dict[str, Range] = {}
    for spec in artifact.inputs:
        low, best, high = added.get_shape(spec.name)
        for index, name in enumerate(spec.axis_names()):
            if isinstance(name, str):
                axes[name] = (int(low[index]), int(best[index]), int(high[index]))
    return Profile(profile.name, axes)


def use_int32_inputs(artifact: Artifact) -> Artifact:
    """Return the artifact with int32 in place of its int64 inputs, as TensorRT 8 reads them."""
    inputs = tuple(replace(s, dtype="int32") if s.dtype == "int64" else s for s in artifact.inputs)
    return replace(artifact, inputs=inputs)


def set_options(trt: Any, config: Any, options: Mapping[str, Any]) -> None:
    config.clear_flag(trt.BuilderFlag.TF32)  # fp32 means fp32: precision is in the graph
    if options.get("workspace"):
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, options["workspace"])
    if options.get("compatible"):
        flag = getattr(trt.BuilderFlag, "VERSION_COMPATIBLE", None)
        if flag is None:
            raise BuildError(f"{trt.__name__} {trt.__version__} is too old for --compatible")
        config.set_flag(flag)
        config.hardware_compatibility_level = trt.HardwareCompatibilityLevel.AMPERE_PLUS
    if (level := options.get("builder_level")) is not None:
        if not hasattr(config, "builder_optimization_level"):
            raise BuildError(f"{trt.__name__} {trt.__version__} is too old for --builder-level")
        config.builder_optimization_level = level
    if options.get("profiling"):
        config.profiling_verbosity = getattr(trt.ProfilingVerbosity, options["profiling"].upper())
    if options.get("timing_cache"):
        path = Path(options["timing_cache"])
        try:
            content = path.read_bytes() if path.exists() else b""
        except OSError as error:
            raise BuildError(f"the timing cache {path} cannot be read: {error.strerror}") from error
        if not config.set_timing_cache(config.create_timing_cache(content), ignore_mismatch=False):
            raise BuildError(
                f"the timing cache {path} is of another GPU or version of TensorRT; name a new file"
            )


def keep_timings(config: Any, path: str | None) -> None:
    """Write the timing cache of this build, for the next one."""
    if path is not None:
        partial = Path(f"{path}.partial")
        try:
            partial.write_bytes(config.get_timing_cache().serialize())
            os.replace(partial, path)
        except OSError as error:
            raise OutputError(f"cannot write the timing cache {path}: {error.strerror}") from error


def read_version(trt: Any) -> tuple[int, int]:
    """Return major and minor version, such as (10, 3)."""
    major, minor = trt.__version__.split(".")[:2]
    return int(major), int(minor)


def import_engine(engine: str, release: Sequence[int] | None = None) -> Any:
    """Return the engine's Python module; refuse one that is too old, or of another major release."""
    trt = import_library(engine)
    if engine == "tensorrt" and read_version(trt) < OLDEST:
        raise BackendUnavailableError(
            f"tensorrt {trt.__version__} is older than {OLDEST[0]}.{OLDEST[1]}, the oldest that PlanForge"
            " builds with: on a Jetson install a newer JetPack, elsewhere pip install 'planforge[tensorrt]'"
        )
    if release is not None and read_version(trt)[0] != release[0]:
        raise BuildError(
            f"the target is for TensorRT {release[0]}, but {trt.__version__} is installed; use --target"
            " tensorrt for the installed version"
        )
    return trt


def find_gpu(wanted: Sequence[str]) -> tuple[list[str], str]:
    """Return the first GPU's compute capability, and the first CUDA of its driver's major version."""
    major = ctypes.c_int()
    minor = ctypes.c_int()
    driver = ctypes.c_int()
    try:
        cuda = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
        failed = (
            cuda.cuInit(0)
            or cuda.cuDeviceGetAttribute(ctypes.byref(major), 75, 0)  # ..._COMPUTE_CAPABILITY_MAJOR
            or cuda.cuDeviceGetAttribute(ctypes.byref(minor), 76, 0)  # ..._COMPUTE_CAPABILITY_MINOR
            or cuda.cuDriverGetVersion(ctypes.byref(driver))
        )
    except OSError:
        failed = True
    if failed:
        raise BackendUnavailableError(
            "engine 'tensorrt' builds for this machine's GPU, and none was found;"
            " --engine tensorrt-rtx builds without a GPU"
        )
    sm = f"sm{major.value}{minor.value}"
    if list(wanted) not in ([], [sm]):
        raise BuildError(f"engine 'tensorrt' builds for this machine's {sm} only, not {', '.join(wanted)}")
    return [sm], f"{driver.value // 1000}.0"


def load_graph(path: Path, slots: int | None) -> ModelProto:
    """Load an ONNX file without its weights, and give its slots axis a fixed length."""
    import onnx

    try:
        model = onnx.load(path, load_external_data=False)
    except Exception as error:  # OSError, or protobuf's own, which is not a ValueError
        raise BuildError(f"{path} cannot be read as ONNX: {error}") from error
    for node in model.graph.node:
        if node.op_type == "Attention" and any(node.input[KEY_LENGTHS:]):
            raise BuildError(
                f"ONNX node {node.name!r} (Attention): TensorRT ignores its input nonpad_kv_seqlen"
                f" ({node.input[KEY_LENGTHS]!r}) and would compute something else; use a mask"
            )
    if slots is not None:
        for value in [*model.graph.input, *model.graph.output, *model.graph.value_info]:
            for dim in value.type.tensor_type.shape.dim:
                if dim.dim_param == SLOTS:
                    dim.dim_value = slots
    return model


def take_out_weights(model: ModelProto) -> list[PlanWeight]:
    """Turn the large weights into inputs, to keep them out of the plan; return the place of each in its file.

    TensorRT's own stripped plans are filled in by a refit, and TensorRT-RTX 1.7 builds a plan that can be
    refitted only where a GPU is. Inputs work everywhere, and a weight that two plans read is there once.
    """
    from onnx import TensorProto, helper

    taken = []
    # TensorRT wants codes and their scales as constants.
    quantized = {
        name for node in model.graph.node if node.op_type == "DequantizeLinear" for name in node.input
    }
    for tensor in list(model.graph.initializer):
        if tensor.name in quantized:
            continue
        place = {entry.key: entry.value for entry in tensor.external_data}
        if tensor.data_location != TensorProto.EXTERNAL or int(place["length"]) < SMALLEST_TAKEN:
            continue
        dtype = str(helper.tensor_dtype_to_np_dtype(tensor.data_type))
        shape = tuple(int(length) for length in tensor.dims)
        taken.append(PlanWeight(tensor.name, dtype, shape, f"onnx/{place['location']}", int(place["offset"])))
        model.graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, shape))
        model.graph.initializer.remove(tensor)
    return taken


def allow_decomposed_attention(trt: Any, network: Any) -> None:
    """Allow attention to run as several kernels where a GPU has no fused one: else the build fails."""
    for i in range(network.num_layers):
        layer = network.get_layer(i)
        if layer.type.name == "ATTENTION_INPUT":
            layer.__class__ = trt.IAttentionInputLayer  # get_layer returns the base class
            layer.attention.decomposable = True


def set_compute_capabilities(trt: Any, config: Any, sms: Sequence[str]) -> None:
    """Set the GPUs to build for, which need not be present."""
    config.num_compute_capabilities = len(sms)
    for index, sm in enumerate(sms):
        capability = getattr(trt.ComputeCapability, sm.upper(), None)
        if capability is None:
            raise BuildError(f"{trt.__name__} {trt.__version__} is too old for {sm}")
        config.set_compute_capability(capability, index)


def write_plan(trt: Any, builder: Any, network: Any, config: Any, path: Path, log: Any) -> None:
    """Build the plan; stream it into the file where TensorRT can, which saves one copy in memory."""
    try:
        with path.open("wb") as file:
            if hasattr(builder, "build_serialized_network_to_stream"):
                writer = make_plan_writer(trt, file)
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
        raise BuildError(f"TensorRT builds no plan: {explain_build_errors(log.errors)}")
    if fatal := [warning for warning in log.warnings if FATAL_WARNING.search(warning)]:
        raise BuildError(f"the plan would fail while running: {explain_build_errors(fatal)}")


def make_plan_writer(trt: Any, file: BinaryIO) -> Any:
    """Return an `IStreamWriter` into a file. It keeps the error, which TensorRT would ignore."""

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
