"""Packages run in their own runtimes, and are held to what PyTorch answered at export."""

from __future__ import annotations

import functools
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from planforge.exporter import export, package
from planforge.exporter.errors import VerificationError
from planforge.exporter.packaging import genai, graphs, optimum
from planforge.exporter.packaging.package import PackageResult
from planforge.exporter.packaging.recipes import find_recipe
from planforge.exporter.passes.build import Builder
from planforge.runtime import TextGenerator
from planforge.runtime.apps.check.texts import FILES
from planforge.runtime.bundle.bundle import Bundle

from ...helpers.llamas import shallow_llama
from ...helpers.optimums import OPTIMUM_PYTHON
from ...helpers.paths import NODE_FOLDER

WHERE: dict[str, Path | None] = {
    "genai": None,
    "transformers.js": NODE_FOLDER,
    "optimum": OPTIMUM_PYTHON,
    "triton": None,
}
GRAPHS = {"PyTorch's tokens, batch 1", "greedy, batch 2, padded", "greedy, batch 8, padded"}
TEXTS = {"ids of texts", "ids of inputs", "texts of ids"}
ANSWERS = {"texts to texts, all at once"}  # of Triton, whose models take texts
SETTINGS = {"settings"}  # which are read back from files
GENERATED = {"texts to texts, with the package's settings"}
LABELLED = {"texts to labels, with the package's settings"}


@pytest.fixture(params=WHERE)
def runtime(request: pytest.FixtureRequest) -> str:
    return need(request.param)


def need(runtime: str) -> str:
    """Return a runtime's name where it is installed; skip the test where it is not."""
    where = WHERE[runtime]
    if where is not None and not where.exists():
        pytest.skip(f"needs make {where.relative_to(Path.cwd())}")
    if runtime == "genai":
        pytest.importorskip("onnxruntime_genai")
    return runtime


def run(runtime: str, bundle: Path, folder: Path, **choices: Any) -> PackageResult:
    return package(bundle, folder, runtime=runtime, runtime_at=WHERE[runtime], **choices)


def list_cases(result: PackageResult) -> set[str]:
    """Return the cases of a package, all of which passed; browsers' kernels have run each of its graphs."""
    assert result.verified and result.version
    cases = {c.case for c in result.comparisons}
    if result.runtime == "transformers.js":
        in_browsers = [c for c in result.comparisons if c.backend.endswith("in WebAssembly")]
        of_graphs = {c.artifact for c in result.comparisons} - {FILES}
        assert {c.artifact for c in in_browsers} == of_graphs
        assert {c.case for c in in_browsers} == cases - TEXTS - SETTINGS - {"chats"}
    return cases


def test_gpt2_in_each_runtime(runtime: str, demo_bundle: Path, tmp_path: Path) -> None:
    cases = list_cases(run(runtime, demo_bundle, tmp_path / "P", precision=["fp32"]))
    own = {"PyTorch's tokens at once"} if runtime == "optimum" else set()
    assert cases == SETTINGS | (ANSWERS if runtime == "triton" else GRAPHS | TEXTS | GENERATED | own)


def test_the_example_for_genai_writes_what_the_bundle_answers(demo_bundle: Path, tmp_path: Path) -> None:
    need("genai")
    package(demo_bundle, tmp_path / "P", runtime="genai", precision=["fp32"], verify=False)
    command = [sys.executable, "docs/examples/genai/generate.py", str(tmp_path / "P"), "In the beginning"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    with TextGenerator.load(demo_bundle, precision="fp32") as model:
        answer = model.generate("In the beginning", max_new_tokens=128, temperature=0.0)
    assert len(answer.text) > 20 and answer.text.startswith(done.stdout.strip("\n")[:200])


def test_fp16_for_a_gpu_computes_the_same_on_a_cpu(tmp_path: Path) -> None:
    options: dict[str, Any] = {"target": ["cuda"], "precision": ["fp16"], "verify": "quick"}
    export("gpt2-demo", tmp_path / "B", **options)
    assert list_cases(run(need("genai"), tmp_path / "B", tmp_path / "P")) >= GRAPHS
    config = json.loads((tmp_path / "P/genai_config.json").read_text())
    assert config["model"]["decoder"]["session_options"]["provider_options"] == [{"cuda": {}}]


@pytest.mark.usefixtures("warm_optimum")
@pytest.mark.parametrize("precision", ["int8", "int4"])  # in fp32 it is as GPT-2, and as other families
@pytest.mark.parametrize("runtime", ["genai", "optimum"])
def test_llama_in_each_precision(
    runtime: str, precision: str, llama_demo_bundle: Path, tmp_path: Path
) -> None:
    result = run(need(runtime), llama_demo_bundle, tmp_path / "P", precision=[precision])
    own = {"PyTorch's tokens at once"} if runtime == "optimum" else set()
    assert list_cases(result) == GRAPHS | TEXTS | SETTINGS | GENERATED | {"chats"} | own


def test_llama_in_javascript_in_all_precisions_at_once(llama_demo_bundle: Path, tmp_path: Path) -> None:
    result = run(need("transformers.js"), llama_demo_bundle, tmp_path / "P")
    assert list_cases(result) == GRAPHS | TEXTS | SETTINGS | GENERATED | {"chats"}
    assert result.artifacts == ("decoder.ort.fp32", "decoder.ort.int8", "decoder.ort.int4")


@pytest.mark.usefixtures("warm_optimum")
@pytest.mark.parametrize("runtime", ["transformers.js", "optimum", "triton"])
def test_vectors_of_an_encoder(runtime: str, bert_bundle: Path, tmp_path: Path) -> None:
    result = run(need(runtime), bert_bundle, tmp_path / "P")
    cases = list_cases(result)
    if runtime == "triton":
        assert cases == {"settings", "texts, all at once", "5 texts, padded"}
        assert result.version is not None and result.version.endswith("in a stand-in for the server")
    else:
        assert cases == SETTINGS | {
            "one by one",
            "5 texts, padded",
            "1 token",
            "256 tokens",
            "ids of texts",
            "ids of inputs",
        }
    errors = {
        case.backend: value
        for case in result.comparisons
        for name, value in case.metrics.items()
        if name == ("last_hidden_state" if runtime == "optimum" else "sentence_embedding") + ".max_error"
    }
    assert errors and max(errors.values()) < 1e-5  # in units of the numbers' spread, which is below 1


@pytest.mark.usefixtures("warm_optimum")
@pytest.mark.parametrize(
    ("runtime", "head"),
    [
        *(("transformers.js", head) for head in ("classifier", "reader", "pretrained", "tagger")),
        *(("optimum", head) for head in ("reader", "classifier")),
        *(("triton", head) for head in ("tagger", "reader", "pretrained", "ranker")),
    ],
)
def test_heads(runtime: str, head: str, head_bundle: Callable[[str], Path], tmp_path: Path) -> None:
    cases = list_cases(run(need(runtime), head_bundle(head), tmp_path / "P", precision=["fp32"]))
    assert (runtime == "triton" or head == "reader") == (not cases >= LABELLED)


@pytest.mark.parametrize("runtime", ["transformers.js", "triton"])
def test_translations_by_two_tokenizers(runtime: str, dates_bundle: Path, tmp_path: Path) -> None:
    cases = list_cases(run(need(runtime), dates_bundle, tmp_path / "P", precision=["fp32"]))
    assert runtime == "triton" or cases >= TEXTS | GENERATED
    if runtime == "transformers.js":  # a page fetches each file whole
        weights = [path.stat().st_size for path in (tmp_path / "P").glob("onnx/*_data")]
        (all_weights,) = (path.stat().st_size for path in dates_bundle.glob("onnx/weights.fp32-*.data"))
        assert len(weights) == 2 and sum(weights) < 1.1 * all_weights


@pytest.mark.parametrize("bundle", ["demo_bundle", "bert_bundle"])
def test_triton_answers_a_request_that_it_refuses(
    bundle: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    opened = Bundle.open(request.getfixturevalue(bundle))
    package(opened.folder, tmp_path / "P", runtime="triton", precision=["fp32"], verify=False)
    recipe = find_recipe("triton")
    worker = recipe.find(None)
    assert worker is not None
    question = {
        "kind": "answer",
        "items": [{"TEXT": "one"}, {"TEXT": "two"}],
        "options": [{}, {"no_such_option": 1}],
    }
    with pytest.raises(VerificationError, match=r"RuntimeError: .*no_such_option"):  # raised by the response
        worker.ask(tmp_path / "P", recipe.choose_options(opened, "fp32"), [question])


@pytest.fixture(scope="module")
def llamas(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Bundles of random checkpoints, verified quickly. Don't change them."""

    @functools.cache
    def write(name: str) -> Path:
        folder = tmp_path_factory.mktemp("llamas")
        shallow_llama(folder / "checkpoint", name)
        export(folder / "checkpoint", folder / "B", target=["cpu"], precision=["fp32"], verify="quick")
        return folder / "B"

    return write


@pytest.mark.usefixtures("warm_optimum")
@pytest.mark.parametrize(
    ("runtime", "name"),
    [
        ("genai", "qwen3"),
        ("genai", "gemma"),
        ("genai", "phi-4-mini"),
        ("transformers.js", "gemma"),
        ("optimum", "qwen3"),  # whose heads are wider than their share of the states
    ],
)
def test_other_families(runtime: str, name: str, llamas: Callable[[str], Path], tmp_path: Path) -> None:
    """Half of the heads share keys, embeddings are scaled, some dimensions alone are rotated."""
    list_cases(run(need(runtime), llamas(name), tmp_path / "P"))


def test_rules_of_the_checkpoint_do_not_disturb_the_comparison(demo_bundle: Path, tmp_path: Path) -> None:
    bundle = Path(shutil.copytree(demo_bundle, tmp_path / "B"))
    manifest = json.loads((bundle / "manifest.json").read_text())
    manifest["generation"] |= {"repetition_penalty": 1.1, "no_repeat_ngram_size": 3}
    (bundle / "manifest.json").write_text(json.dumps(manifest))
    list_cases(run(need("genai"), bundle, tmp_path / "P", precision=["fp32"]))


def plant(change: Callable[[ir.Graph], None]) -> Callable[..., None]:
    """Return what makes a package's graph, and then a fault in it."""
    sound = graphs.take_attention_mask

    def take(graph: ir.Graph, **choices: Any) -> None:
        sound(graph, **choices)
        change(graph)

    return take


def scale_logits(graph: ir.Graph) -> None:
    """Logits 2 % too large."""
    add = Builder(graph, None, "fault")
    logits = graph.outputs[0]
    scaled = add("Mul", logits, np.float32(1.02))
    scaled.type, scaled.shape, name = logits.type, logits.shape, logits.name
    logits.name, scaled.name = "sound", name
    graph.outputs[0] = scaled


def forget_padding(graph: ir.Graph) -> None:
    """Each row's last place is taken for its last token."""
    length = next(node for node in graph if node.op_type == "Shape").outputs[0]
    last = [node for node in graph if node.op_type == "Sub" and str(node.name).startswith("package_")][-1]
    last.replace_input_with(0, length)


def repeat_the_last_place(graph: ir.Graph) -> None:
    """Every place of a row has the logits of its last one, which is all that generating reads."""
    places = [node for node in graph if node.op_type == "Mod" and str(node.name).startswith("package_")][-1]
    ((user, index),) = places.outputs[0].uses()
    add = Builder(graph, user, "fault")
    end = np.array([np.iinfo(np.int64).max])
    last = add("Slice", places.outputs[0], np.array([-1]), end, np.array([1]))
    user.replace_input_with(index, add("Add", add("Mul", places.outputs[0], 0), last))


@pytest.mark.usefixtures("warm_optimum")
def test_logits_of_other_places_are_compared(
    demo_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need("optimum")
    monkeypatch.setattr(optimum, "take_attention_mask", plant(repeat_the_last_place))
    with pytest.raises(VerificationError, match=r"PyTorch's tokens at once: .* \(1 of 9 cases failed\)"):
        run("optimum", demo_bundle, tmp_path / "P")


@pytest.mark.parametrize(
    ("fault", "case"),
    [(scale_logits, "PyTorch's tokens, batch 1"), (forget_padding, "greedy, batch 2, padded")],
)
def test_a_fault_in_a_package_is_refused(
    fault: Callable[[ir.Graph], None],
    case: str,
    demo_bundle: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    need("genai")
    monkeypatch.setattr(genai, "take_attention_mask", plant(fault))
    with pytest.raises(VerificationError, match=f"onnxruntime-genai .*: {case}"):
        run("genai", demo_bundle, tmp_path / "P")
    assert not (tmp_path / "P").exists()
