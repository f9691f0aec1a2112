"""What load() refuses before it hands anything out."""

from __future__ import annotations

from pathlib import Path

import pytest

from planforge.runtime import TextEncoder, TextGenerator, Translator, load
from planforge.runtime.backends.dialects import choose_artifact
from planforge.runtime.backends.ort_program import OrtProgram
from planforge.runtime.bundle import bundle as bundle_module
from planforge.runtime.bundle.bundle import Bundle
from planforge.runtime.errors import InputError, IntegrityError, MemoryLimitError, PlanForgeError


def weights_of(folder: Path, precision: str) -> int:
    bundle = Bundle.open(folder)
    graphs = {artifact.graph for artifact in bundle.manifest.artifacts}
    names = {name for graph in graphs for name in choose_artifact(bundle, graph, precision).data}
    return sum((folder / name).stat().st_size for name in names)


@pytest.mark.parametrize("bundle", ["demo_bundle", "dates_bundle", "minilm_bundle"])
def test_weights_above_the_memory_limit_are_not_even_loaded(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, bundle: str
) -> None:
    folder: Path = request.getfixturevalue(bundle)
    weights = weights_of(folder, "fp32")

    def opened(*arguments: object) -> None:
        raise AssertionError("a graph was opened")

    monkeypatch.setattr(OrtProgram, "__init__", opened)
    with pytest.raises(MemoryLimitError, match=rf"{weights / 1e6:.1f} MB of weights in fp32 and") as caught:
        load(folder, precision="fp32", memory_limit=weights)
    assert caught.value.needed > caught.value.limit == weights


def test_weights_of_two_graphs_are_hashed_once(dates_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[str] = []
    compute_sha256 = bundle_module.compute_sha256

    def counting(path: Path) -> str:
        hashed.append(path.name)
        return compute_sha256(path)

    monkeypatch.setattr(bundle_module, "compute_sha256", counting)
    load(dates_bundle, precision="fp32").close()
    assert len(hashed) == len(set(hashed))
    assert len([name for name in hashed if "weights" in name]) == 1
    assert len([name for name in hashed if name.endswith(".onnx")]) == 2


@pytest.mark.parametrize("part", ["onnx/weights.fp32", "tokenizer/", "onnx/decoder."])
def test_a_damaged_file_ends_the_load(own_bundle: Path, part: str) -> None:
    for path in own_bundle.rglob("*.*"):
        if path.relative_to(own_bundle).as_posix().startswith(part):
            content = bytearray(path.read_bytes())
            content[len(content) // 2] ^= 1
            path.write_bytes(content)
    with pytest.raises(IntegrityError, match=f"{part}.* has changed since it was exported"):
        load(own_bundle, precision="fp32")


def test_the_engine_never_reads_a_graph_that_was_changed(
    own_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in own_bundle.glob("onnx/decoder.*"):
        path.write_bytes(b"\0" * path.stat().st_size)
    read: list[Path] = []
    monkeypatch.setattr(OrtProgram, "__init__", lambda self, path, threads: read.append(path))
    with pytest.raises(PlanForgeError, match="has changed"):
        load(own_bundle, precision="fp32")
    assert read == []


def test_each_class_opens_its_own_bundles_and_names_the_right_class(
    demo_bundle: Path, minilm_bundle: Path, dates_bundle: Path
) -> None:
    classes: dict[type[TextGenerator | TextEncoder | Translator], Path] = {
        TextGenerator: demo_bundle,
        TextEncoder: minilm_bundle,
        Translator: dates_bundle,
    }
    for model_class, folder in classes.items():
        with model_class.load(folder, backend="ort-cpu", precision="fp32", threads=1) as model:
            assert type(model) is model_class
            artifact = model.artifact.id
            family = Bundle.open(folder).manifest.family
            assert repr(model) == f"{model_class.__name__}({family}, {artifact}, ort-cpu, 1 thread)"
        with load(folder) as model:
            assert type(model) is model_class
        for other in set(classes) - {model_class}:
            with pytest.raises(
                InputError, match=f"{other.__name__} does not support; open it with {model_class.__name__}"
            ):
                other.load(folder)


def test_a_misspelt_option_is_refused_with_the_one_that_was_meant(demo_bundle: Path) -> None:
    message = "unknown option 'precison'; did you mean 'precision'\\? There are: backend, precision, threads"
    for opener in (load, TextGenerator.load):
        with pytest.raises(InputError, match=message):
            opener(demo_bundle, precison="fp32")  # type: ignore[call-arg]


def test_a_class_of_ones_own_is_what_its_load_returns(demo_bundle: Path) -> None:
    class Own(TextGenerator):
        """A class that a user derived."""

    with Own.load(demo_bundle) as model:
        assert type(model) is Own
