"""Lists of the names that each TensorRT has, and the script that reads them out of NVIDIA's sources."""

from __future__ import annotations

import json
import re
from hashlib import sha256
from pathlib import Path

import pytest

from ...helpers.tensorrt_api.read_sources import compact, read_release
from ...helpers.tensorrt_surface import FOLDER, VERSIONS, Surface

SURFACES = {version: Surface(version) for version in (*VERSIONS, "10.13")}


def number(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


# The lists


@pytest.mark.parametrize("version", SURFACES)
def test_a_list_says_which_files_it_was_read_from(version: str) -> None:
    surface = SURFACES[version]
    assert surface.version == version and surface.release.startswith(f"{version}.")
    assert {"include/NvInfer.h", "include/NvInferRuntime.h", "python/src/infer/pyCore.cpp"} <= set(
        surface.sources
    )
    assert all(re.fullmatch("[0-9a-f]{64}", digest) for digest in surface.sources.values())
    assert len(set(surface.sources.values())) == len(surface.sources)
    assert bool(has_parser_header(surface)) == (version not in ("10.3", "10.13"))
    assert (FOLDER / f"{version}.json").stat().st_size < 150_000


def has_parser_header(surface: Surface) -> bool:
    """NVIDIA's parser is another repository; its header of two releases was not to be had."""
    return not {"onnx/NvOnnxParser.h", "include/NvOnnxParser.h"}.isdisjoint(surface.sources)


# From the headers of 8.2 to 11.1, read by eye: the releases that had a name, first and last.
HISTORY = [
    ("8.5", "11.1", "IExecutionContext::enqueueV3", "IExecutionContext.execute_async_v3"),
    ("8.2", "9.3", "IExecutionContext::enqueueV2", "IExecutionContext.execute_async_v2"),
    ("8.2", "10.16", "BuilderFlag::kFP16", "BuilderFlag.FP16"),
    ("8.2", "10.16", "IInt8Calibrator::getBatchSize", "IInt8Calibrator"),
    (
        "8.2",
        "10.16",
        "NetworkDefinitionCreationFlag::kEXPLICIT_BATCH",
        "NetworkDefinitionCreationFlag.EXPLICIT_BATCH",
    ),
    (
        "9.0",
        "11.1",
        "NetworkDefinitionCreationFlag::kSTRONGLY_TYPED",
        "NetworkDefinitionCreationFlag.STRONGLY_TYPED",
    ),
    ("8.6", "11.1", "BuilderFlag::kVERSION_COMPATIBLE", "BuilderFlag.VERSION_COMPATIBLE"),
    ("8.6", "11.1", "HardwareCompatibilityLevel::kAMPERE_PLUS", "HardwareCompatibilityLevel.AMPERE_PLUS"),
    ("8.6", "11.1", "INormalizationLayer::setEpsilon", "INormalizationLayer.epsilon"),
    (
        "8.6",
        "11.1",
        "IBuilderConfig::setBuilderOptimizationLevel",
        "IBuilderConfig.builder_optimization_level",
    ),
    (
        "10.9",
        "11.1",
        "HardwareCompatibilityLevel::kSAME_COMPUTE_CAPABILITY",
        "HardwareCompatibilityLevel.SAME_COMPUTE_CAPABILITY",
    ),
    ("10.0", "11.1", "DataType::kINT4", "DataType.INT4"),
    ("10.0", "11.1", "BuilderFlag::kSTRIP_PLAN", "BuilderFlag.STRIP_PLAN"),
    ("10.0", "11.1", "BuilderFlag::kWEIGHT_STREAMING", "BuilderFlag.WEIGHT_STREAMING"),
    ("10.0", "11.1", "ActivationType::kGELU_TANH", "ActivationType.GELU_TANH"),
    ("10.3", "11.1", "BuilderFlag::kREFIT_INDIVIDUAL", "BuilderFlag.REFIT_INDIVIDUAL"),
    ("10.3", "11.1", "PreviewFeature::kALIASED_PLUGIN_IO_10_03", "PreviewFeature.ALIASED_PLUGIN_IO_10_03"),
    ("10.8", "11.1", "BuilderFlag::kEDITABLE_TIMING_CACHE", "BuilderFlag.EDITABLE_TIMING_CACHE"),
    ("10.8", "11.1", "IBuilderConfig::setL2LimitForTiling", "IBuilderConfig.l2_limit_for_tiling"),
    ("10.11", "11.1", "ICudaEngine::createRuntimeConfig", "IRuntimeConfig"),
    ("10.14", "11.1", "INetworkDefinition::addAttention", "IAttention"),
    ("10.15", "11.1", "INetworkDefinition::addRotaryEmbedding", "IRotaryEmbeddingLayer"),
    ("10.15", "11.1", "INetworkDefinition::addKVCacheUpdate", "IKVCacheUpdateLayer"),
    ("10.15", "11.1", "ICudaEngine::getAliasedInputTensor", "ICudaEngine.get_aliased_input_tensor"),
    ("10.16", "11.1", "INetworkDefinition::addDistCollective", "IDistCollectiveLayer"),
    ("11.0", "11.1", "CausalMaskKind::kLOWER_RIGHT", "CausalMaskKind.LOWER_RIGHT"),
    ("11.0", "11.1", "IAttention::setKeyValueLengths", "IAttention.key_value_lengths"),
    ("11.0", "11.1", "IAttention::getQueryForm", "AttentionIOForm"),
]


@pytest.mark.parametrize(("first", "last", "declared", "bound"), HISTORY, ids=[row[2] for row in HISTORY])
def test_a_name_comes_and_goes_with_its_releases(first: str, last: str, declared: str, bound: str) -> None:
    expected = {v: number(first) <= number(v) <= number(last) for v in SURFACES}
    assert {v: surface.declares(declared) for v, surface in SURFACES.items()} == expected
    assert {v: surface.has(bound) for v, surface in SURFACES.items()} == expected


# Names that our code uses, and what they are bound to in C++.
BOUND = {
    "Builder.create_network": "IBuilder::createNetworkV2",
    "Builder.create_builder_config": "IBuilder::createBuilderConfig",
    "Builder.create_optimization_profile": "IBuilder::createOptimizationProfile",
    "Builder.build_serialized_network": "IBuilder::buildSerializedNetwork",
    "Builder.build_serialized_network_to_stream": "IBuilder::buildSerializedNetworkToStream",
    "BuilderFlag.TF32": "BuilderFlag::kTF32",
    "BuilderFlag.PREFER_PRECISION_CONSTRAINTS": "BuilderFlag::kPREFER_PRECISION_CONSTRAINTS",
    "IBuilderConfig.clear_flag": "IBuilderConfig::clearFlag",
    "IBuilderConfig.add_optimization_profile": "IBuilderConfig::addOptimizationProfile",
    "IBuilderConfig.set_memory_pool_limit": "IBuilderConfig::setMemoryPoolLimit",
    "IBuilderConfig.set_timing_cache": "IBuilderConfig::setTimingCache",
    "IBuilderConfig.hardware_compatibility_level": "IBuilderConfig::setHardwareCompatibilityLevel",
    "IBuilderConfig.builder_optimization_level": "IBuilderConfig::setBuilderOptimizationLevel",
    "IBuilderConfig.profiling_verbosity": "IBuilderConfig::setProfilingVerbosity",
    "ProfilingVerbosity.DETAILED": "ProfilingVerbosity::kDETAILED",
    "IOptimizationProfile.set_shape": "IOptimizationProfile::setDimensions",
    "INetworkDefinition.get_layer": "INetworkDefinition::getLayer",
    "INetworkDefinition.num_inputs": "INetworkDefinition::getNbInputs",
    "INetworkDefinition.add_topk": "INetworkDefinition::addTopK",
    "ILayer.get_input": "ILayer::getInput",
    "ILayer.type": "ILayer::getType",
    "ILayer.precision": "ILayer::setPrecision",
    "ITensor.dtype": "ITensor::getType",
    "IAttentionInputLayer.attention": "IAttentionBoundaryLayer::getAttention",
    "IAttention.decomposable": "IAttention::setDecomposable",
    "LayerType.KV_CACHE_UPDATE": "LayerType::kKVCACHE_UPDATE",
    "IStreamWriter.write": "IStreamWriter::write",
    "ILogger.Severity.WARNING": "Severity::kWARNING",
    "Runtime.deserialize_cuda_engine": "IRuntime::deserializeCudaEngine",
    "Runtime.engine_host_code_allowed": "IRuntime::setEngineHostCodeAllowed",
    "ICudaEngine.create_execution_context_without_device_memory": (
        "ICudaEngine::createExecutionContextWithoutDeviceMemory"
    ),
    "ICudaEngine.device_memory_size": "ICudaEngine::getDeviceMemorySize",
    "ICudaEngine.get_device_memory_size_for_profile": "ICudaEngine::getDeviceMemorySizeForProfile",
    "ICudaEngine.get_device_memory_size_for_profile_v2": "ICudaEngine::getDeviceMemorySizeForProfileV2",
    "ICudaEngine.get_aliased_input_tensor": "ICudaEngine::getAliasedInputTensor",
    "ICudaEngine.get_tensor_profile_shape": "ICudaEngine::getProfileShape",
    "ICudaEngine.num_io_tensors": "ICudaEngine::getNbIOTensors",
    "ICudaEngine.create_runtime_config": "ICudaEngine::createRuntimeConfig",
    "IExecutionContext.set_device_memory": "IExecutionContext::setDeviceMemoryV2",
    "IExecutionContext.set_tensor_address": "IExecutionContext::setTensorAddress",
    "IExecutionContext.set_optimization_profile_async": "IExecutionContext::setOptimizationProfileAsync",
    "ExecutionContextAllocationStrategy.USER_MANAGED": "ExecutionContextAllocationStrategy::kUSER_MANAGED",
    "ICudaEngine.create_engine_inspector": "ICudaEngine::createEngineInspector",
    "EngineInspector.execution_context": "IEngineInspector::setExecutionContext",
    "EngineInspector.get_engine_information": "IEngineInspector::getEngineInformation",
    "LayerInformationFormat.JSON": "LayerInformationFormat::kJSON",
    "IExecutionContext.profiler": "IExecutionContext::setProfiler",
    "IProfiler.report_layer_time": "IProfiler::reportLayerTime",
    "Refitter.set_named_weights": "IRefitter::setNamedWeights",
    "Refitter.refit_cuda_engine": "IRefitter::refitCudaEngine",
}
BOUND_PARSER = {
    "OnnxParser.parse": "IParser::parse",
    "ParserError.node": "IParserError::node",
    "ParserError.node_name": "IParserError::nodeName",
    "ParserError.node_operator": "IParserError::nodeOperator",
    "ParserError.local_function_stack": "IParserError::localFunctionStack",
    "OnnxParserRefitter.refit_from_bytes": "IParserRefitter::refitFromBytes",
    "OnnxParserRefitter.refit_from_file": "IParserRefitter::refitFromFile",
}


@pytest.mark.parametrize("version", SURFACES)
def test_python_has_a_name_where_cpp_has_what_it_is_bound_to(version: str) -> None:
    surface = SURFACES[version]
    names = BOUND | (BOUND_PARSER if has_parser_header(surface) else {})
    declared = [name for name, cpp in names.items() if surface.declares(cpp)]
    assert [name for name in names if surface.has(name)] == declared


def test_the_sources_of_10_13_say_what_its_compiled_module_says() -> None:
    """tensorrt-stubs were made from the module; they leave out what can only be written."""
    stubs = json.loads((FOLDER / "10.13-stubs.json").read_text(encoding="utf-8"))
    ours = SURFACES["10.13"]
    write_only = {
        "Builder": {"gpu_allocator"},
        "IExecutionContext": {"device_memory"},
        "ISymExpr": {"dtype", "expr", "type"},
        "Runtime": {"gpu_allocator"},
    }
    package = {"common_enter", "common_exit", "nptype", "volume"}  # in Python, above the compiled module
    assert set(stubs["functions"]) == set(ours.functions) - package
    assert set(stubs["constants"]) == set(ours.constants)
    assert {name: set(members) for name, members in stubs["enums"].items() if name != "Logger.Severity"} == {
        name: set(members) for name, members in ours.enums.items()
    }
    assert {name: parts["bases"] for name, parts in stubs["classes"].items()} == {
        name: parts["bases"] for name, parts in ours.classes.items()
    }
    severities = set(ours.enums["ILogger.Severity"])  # given to Logger by the package's loop
    for name, parts in stubs["classes"].items():
        own = {*ours.classes[name]["methods"], *ours.classes[name]["properties"]}
        public = {part for part in own if not part.startswith("__")} - write_only.get(name, set())
        theirs = set(parts["attributes"])
        if name == "Logger":
            theirs = theirs - severities
            public = public - {"Severity"}
        if name in ("NodeIndices", "PluginFieldCollection", "SubGraphCollection"):
            theirs -= {"count", "remove"}  # of vectors whose elements compare
        assert public == theirs, name
    assert sum(len(parts["attributes"]) for parts in stubs["classes"].values()) > 700


# The script

HEADER = r"""
#ifndef NV_INFER_H
#define NV_CALL(x) class NotThis { int f(); };
/* class NorThis { public: int f(); }; */
namespace nvinfer1
{
class IForward;
enum class BuilderFlag : int32_t
{
    kFP16 = 0, //!< a comment, with a comma
    kINT8 TRT_DEPRECATED_ENUM = 1,
    kREFIT,
    kTF32 = 6,
};
enum class Flag : uint64_t { kA = 1ULL << 3, kB = 1U << 4 };
template <> constexpr int32_t EnumMax<BuilderFlag>() noexcept { return 4; }
namespace v_1_0
{
class TRT_DEPRECATED ILogger
{
public:
    enum class Severity : int32_t { kERROR = 1, kWARNING = 2 };
    virtual void log(Severity severity, char const* text) noexcept = 0;
    virtual ~ILogger() = default;
};
}
using ILogger = v_1_0::ILogger;
class INoCopy
{
protected:
    INoCopy() = default;
    void hidden() noexcept;
};
struct Pair { int32_t a{}; int32_t sum() const { return a + twice(a); } };
class IBuilder : public INoCopy
{
public:
    IBuilder(int32_t size) : mImpl{nullptr}, mSize(size) { check(size); }
    TRT_DEPRECATED_BECAUSE("use the other (new) one") bool setSize(int32_t size) noexcept
    {
        return mImpl->reallySetSize(size);
    }
    TRT_NODISCARD int32_t getSize() const noexcept { return mSize; }
    bool operator==(IBuilder const& other) const;
    using INoCopy::hidden;
    friend void stranger(IBuilder&);

protected:
    void alsoHidden();
};
class ISpecial : public nvinfer1::IBuilder, private Other {};
enum class ErrorCode : int32_t { kSUCCESS = 0 };
} // namespace nvinfer1
"""
BINDINGS = r"""
#define TWICE(f) m.def("not_this", f)
static auto const lambda = [](IBuilder& self) { return self.getSize(); };
void bind(py::module& m)
{
    py::class_<nvinfer1::ILogger, PyLogger> base{m, "ILogger", doc::logger};
    py::enum_<ILogger::Severity>(base, "Severity", py::arithmetic())
        .value("ERROR", ILogger::Severity::kERROR).value("WARNING", ILogger::Severity::kWARNING)
        .export_values();
    base.def(py::init<>()).def("log", &ILogger::log, "severity"_a);
    // .def("commented_out", nullptr)
    py::class_<IBuilder, std::unique_ptr<IBuilder, py::nodelete>>(
        m, "Builder", "a text; with (brackets", py::module_local())
        .def(py::init([](ILogger& logger) { return create(logger, "x"); }), "logger"_a)
        .def_property("size", lambda, deprecate(&IBuilder::setSize, "set_size()"))
        .def_property_readonly("gone", &IBuilder::getGone)
        .def_static("cast", py::overload_cast<int, int>(&cast))
        .def("__len__", [](IBuilder& self) { return self.size(); })
        .def("__del__", &nothing)
#if ENABLE_INETWORK_SERIALIZE
        .def("never_built", &IBuilder::never)
#endif
        ;
    py::class_<ISpecial, IBuilder>(m, "Special").def_readwrite("kind", &ISpecial::getSize);
    py::bind_vector<std::vector<size_t>>(m, "Indices");
    py::enum_<BuilderFlag>(m, "BuilderFlag").value("FP16", BuilderFlag::kFP16).value("X", BuilderFlag::kX);
    m.attr("half") = DataType::kHALF;
    m.attr("Flag") = m.attr("BuilderFlag");
    m.attr("_registry") = py::none();
    py::enum_<ErrorCode>(m, "ErrorCode").value("BAD", ErrorCode::kBAD).value("WORSE", ErrorCode::kWORSE);
    m.def("version", &version, "a"_a = 1);
}
"""
PACKAGE = """
def volume(iterable):
    def inner(): pass

Builder.__enter__ = common_enter
    Builder.more = property(volume)
Unknown.name = 1
"""


def test_the_script_reads_names_out_of_cpp(tmp_path: Path) -> None:
    files = {
        "include/NvInfer.h": HEADER,
        "include/NvInferVersion.h": "#define TRT_MAJOR_ENTERPRISE 10\n#define NV_TENSORRT_MAJOR TRT_X\n"
        "#define NV_TENSORRT_MINOR 3\n#define NV_TENSORRT_PATCH 1 //!< patch\n#define NV_TENSORRT_BUILD 9\n",
        "include/NvOnnxParser.h": "namespace nvonnxparser { enum class ErrorCode : int { kGOOD, kBAD }; }",
        "include/NvUtils.h": "class INotRead { public: void f(); };",
        "python/src/infer/pyCore.cpp": BINDINGS,
        "python/packaging/bindings_wheel/tensorrt/__init__.py": PACKAGE,
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    names, lost = read_release("10.3", tmp_path / "python", [tmp_path / "include"])
    assert lost == ["BuilderFlag::kX", "ErrorCode::kWORSE", "IBuilder::getGone"]
    assert json.loads(compact(names)) == names
    del files["include/NvUtils.h"]
    assert names == {
        "version": "10.3",
        "release": "10.3.1",
        "sources": {name: sha256(text.encode()).hexdigest() for name, text in files.items()},
        "headers": {"ILogger": ["log"], "IBuilder": ["getSize", "setSize"], "Pair": ["sum"]},
        "enums": {
            "BuilderFlag": {"kFP16": 0, "kINT8": 1, "kREFIT": 2, "kTF32": 6},
            "ErrorCode": {"kSUCCESS": 0},
            "Flag": {"kA": 8, "kB": 16},
            "Severity": {"kERROR": 1, "kWARNING": 2},
            "nvonnxparser::ErrorCode": {"kGOOD": 0, "kBAD": 1},
        },
        "python": {
            "classes": {
                "ILogger": {
                    "bases": [],
                    "methods": ["__init__", "log"],
                    "properties": ["ERROR", "WARNING"],
                },
                "Builder": {
                    "bases": [],
                    "methods": ["__enter__", "__init__", "__len__", "cast"],
                    "properties": ["gone", "more", "size"],
                },
                "Special": {"bases": ["Builder"], "methods": [], "properties": ["kind"]},
                "Indices": {
                    "bases": [],
                    "methods": ["append", "clear", "extend", "insert", "pop"],
                    "properties": [],
                },
            },
            "enums": {
                "ILogger.Severity": ["ERROR", "WARNING"],
                "BuilderFlag": ["FP16", "X"],
                "ErrorCode": ["BAD", "WORSE"],
                "Flag": ["FP16", "X"],
            },
            "functions": ["version", "volume"],
            "constants": ["half"],
        },
    }
