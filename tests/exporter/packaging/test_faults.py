"""Faults planted in packages are found, each with a message that names it."""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from planforge.exporter import package
from planforge.exporter.errors import VerificationError
from planforge.exporter.packaging import triton
from planforge.exporter.packaging.check import describe_difference, report
from planforge.exporter.packaging.default_checks import OwnAnswer, compare_answers, list_default_checks
from planforge.exporter.packaging.recipes import Recipe, find_recipe
from planforge.exporter.packaging.run import run_package
from planforge.exporter.packaging.settings_check import compare_settings
from planforge.exporter.packaging.worker import Worker
from planforge.exporter.packaging.workers.pbtxt import read_pbtxt
from planforge.runtime import InputError, TextGenerator, load
from planforge.runtime.apps.check.divergence import Sample
from planforge.runtime.apps.check.outcome import Comparison
from planforge.runtime.bundle.artifact import Artifact
from planforge.runtime.bundle.bundle import Bundle
from planforge.runtime.bundle.defaults import GenerationDefaults

from .test_runtimes import WHERE, need

Package = Callable[[str, str], Path]  # by runtime, and bundle


@pytest.fixture(scope="module")
def bundles(
    demo_bundle: Path, dates_bundle: Path, minilm_bundle: Path, head_bundle: Callable[[str], Path]
) -> Mapping[str, Path]:
    heads = {name: head_bundle(name) for name in ("classifier", "reader")}
    return {"gpt2": demo_bundle, "dates": dates_bundle, "embedder": minilm_bundle, **heads}


def write_package(runtime: str, bundle: Path, folder: Path) -> Path:
    package(bundle, folder, runtime=runtime, precision=["fp32"], verify=False)
    return folder


@pytest.fixture(scope="module")
def sound(bundles: Mapping[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Package:
    """Packages that were not run, each written once. Don't change them."""
    folder = tmp_path_factory.mktemp("sound")

    @functools.cache
    def write(runtime: str, name: str) -> Path:
        return write_package(runtime, bundles[name], folder / f"{runtime}-{name}")

    return write


@pytest.fixture
def packaged(sound: Package, tmp_path: Path) -> Package:
    """A copy of a package that was not run, to plant a fault in."""
    return lambda runtime, name: Path(shutil.copytree(sound(runtime, name), tmp_path / runtime))


def find_decider(bundle: Bundle, folder: Path) -> Artifact:
    """Return the last graph of a package."""
    told = json.loads((folder / "planforge.json").read_text())
    return bundle.manifest.artifact(told["artifacts"][-1])


def compare(bundle: Path, folder: Path, runtime: str = "x") -> Comparison:
    """Compare the settings of a package with those of its bundle."""
    opened = Bundle.open(bundle)
    return compare_settings(opened, find_decider(opened, folder), folder, runtime)


def change_text(path: Path, text: str, fault: str) -> None:
    content = path.read_text()
    assert text in content
    path.write_text(content.replace(text, fault))


def find_worker(runtime: str) -> tuple[Recipe, Worker]:
    recipe = find_recipe(need(runtime))
    worker = recipe.find(WHERE[runtime])
    assert worker is not None
    return recipe, worker


def run(runtime: str, bundle: Path, folder: Path) -> dict[str, str]:
    """Return what the cases of a package that fail say first."""
    recipe, worker = find_worker(runtime)
    opened = Bundle.open(bundle)
    told = json.loads((folder / "planforge.json").read_text())
    artifacts = [opened.manifest.artifact(name) for name in told["artifacts"]]
    _, comparisons = run_package(opened, recipe, worker, folder, artifacts, lambda _: None)
    return {c.case: c.failures[0] for c in comparisons if not c.passed}


def run_by_settings(runtime: str, bundle: Path, folder: Path) -> tuple[str, ...]:
    """Return how the answers differ that a package gives by its own settings; its files are not read here."""
    recipe, worker = find_worker(runtime)
    opened = Bundle.open(bundle)
    decides = find_decider(opened, folder)
    (check,) = list_default_checks(opened, decides)
    answers = worker.ask(folder, recipe.choose_options(opened, decides.precision), check.questions)
    return check.judge(answers.answers).failures


def edit(path: Path, **values: Any) -> None:
    """Change values of a JSON file; ... removes one."""
    content = {**json.loads(path.read_text()), **values}
    path.write_text(json.dumps({name: value for name, value in content.items() if value is not ...}))


ROTATED = {"0": "LABEL_1", "1": "LABEL_2", "2": "LABEL_0"}
# By the runtime and the bundle: files, values that are changed in them, and what is told.
SETTINGS: dict[tuple[str, str], list[tuple[str, dict[str, Any], str]]] = {
    ("optimum", "gpt2"): [
        ("generation_config.json", {"eos_token_id": 7}, r"eos_token_id is \[7\], .* is \[0\]"),
        ("config.json", {"eos_token_id": 7}, r"config.json: eos_token_id is \[7\]"),
        ("tokenizer_config.json", {"padding_side": "right"}, "padding_side is 'right'"),
        ("tokenizer_config.json", {"pad_token": ...}, "pad_token is None"),
        ("tokenizer_config.json", {"model_max_length": 16}, "model_max_length is 16, .* 256"),
        ("generation_config.json", {"pad_token_id": 9}, "pad_token_id is 9"),
        ("generation_config.json", {"min_new_tokens": 40}, "min_new_tokens is 40"),
        ("generation_config.json", {"renormalize_logits": True}, "renormalize_logits is True"),
        ("tokenizer.json", {"pre_tokenizer": None}, "tokenizer.json: pre_tokenizer is"),
    ],
    ("transformers.js", "dates"): [
        ("generation_config.json", {"max_new_tokens": 2}, "max_new_tokens is 2, .* 15"),
        ("generation_config.json", {"bad_words_ids": ...}, r"bad_words_ids is \[\]"),
        ("target/tokenizer_config.json", {"eos_token": ...}, "target/.*eos_token is None"),
    ],
    ("transformers.js", "classifier"): [
        ("tokenizer_config.json", {"mask_token": ...}, r"is None, .* is '\[MASK\]'"),
        ("config.json", {"id2label": ROTATED}, "id2label is {'0': 'LABEL_1'"),
    ],
    ("optimum", "classifier"): [
        ("config.json", {"problem_type": "multi_label_classification"}, "problem_type is"),
        ("config.json", {"architectures": ["BertModel"]}, "architectures is 'Model'"),
        ("tokenizer_config.json", {"model_input_names": ["input_ids"]}, "input_names is"),
    ],
    ("transformers.js", "embedder"): [
        ("1_Pooling/config.json", {"pooling_mode_cls_token": True}, "cls_token"),
        ("config_sentence_transformers.json", {"prompts": {"a": "b"}}, "prompts is"),
    ],
    ("genai", "gpt2"): [
        ("genai_config.json", {"search": {"length_penalty": 2.0}}, "search.length_penalty is 2.0"),
        ("genai_config.json", {"model": {"pad_token_id": 5}}, "model.pad_token_id is 5"),
        ("genai_config.json", {"search": {"max_length": 16}}, "search.max_length is 16, .* 256"),
        ("genai_config.json", {"model": {"eos_token_id": [5]}}, r"model.eos_token_id is \[5\]"),
    ],
}


@pytest.mark.parametrize(
    ("runtime", "name", "file", "values", "message"),
    [(*where, *fault) for where, faults in SETTINGS.items() for fault in faults],
)
def test_settings_are_read_back(
    runtime: str,
    name: str,
    file: str,
    values: dict[str, Any],
    message: str,
    packaged: Package,
    bundles: Mapping[str, Path],
) -> None:
    folder = packaged(runtime, name)
    assert compare(bundles[name], folder, runtime).passed
    edit(folder / file, **values)
    assert re.search(message, str(compare(bundles[name], folder, runtime).failures))


def test_two_words_that_are_exchanged_are_found(packaged: Package, bundles: Mapping[str, Path]) -> None:
    """No golden text needs to have them."""
    folder = packaged("genai", "gpt2")
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    vocabulary = content["model"]["vocab"]
    first, second = list(vocabulary)[-2:]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    path.write_text(json.dumps(content))
    (failure,) = compare(bundles["gpt2"], folder).failures
    assert failure.startswith("tokenizer.json: model is '")


def test_a_tokenizer_that_reads_otherwise_is_found(packaged: Package, bundles: Mapping[str, Path]) -> None:
    folder = packaged("genai", "gpt2")
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary |= {"Ġthe": vocabulary["Ġand"], "Ġand": vocabulary["Ġthe"]}
    path.write_text(json.dumps(content))
    failures = run("genai", bundles["gpt2"], folder)
    assert failures.keys() >= {"settings", "ids of texts", "texts of ids"}
    assert " gives [" in failures["ids of texts"] and ", wanted is [" in failures["ids of texts"]


def test_the_tokens_that_a_chat_template_names_go_first(demo_bundle: Path, tmp_path: Path) -> None:
    """Those of Llama's chats end otherwise than its texts."""
    bundle = Path(shutil.copytree(demo_bundle, tmp_path / "B"))
    opened = Bundle.open(bundle)
    name = next(iter(opened.manifest.tokenizer["files"]))
    tokenizer = {**opened.manifest.tokenizer, "chat_template": {"file": name, "tokens": {"eos_token": "the"}}}
    edit(bundle / "manifest.json", tokenizer=tokenizer)
    package(bundle, tmp_path / "P", runtime="genai", precision=["fp32"], verify=False)
    compared = compare(bundle, tmp_path / "P")
    assert compared.passed, compared.failures


def test_what_genai_draws_by_is_read_back(bundles: Mapping[str, Path], tmp_path: Path) -> None:
    manifest = bundles["gpt2"] / "manifest.json"
    generation = json.loads(manifest.read_text())["generation"]
    edit(manifest, generation={**generation, "do_sample": True, "top_k": 20, "top_p": 0.9})
    try:
        folder = write_package("genai", bundles["gpt2"], tmp_path / "P")
        config = json.loads((folder / "genai_config.json").read_text())
        assert not compare(bundles["gpt2"], folder).failures
        wrong = {"temperature": 5.0, "top_k": 1, "top_p": 0.01}
        edit(folder / "genai_config.json", search={**config["search"], **wrong})
        failures = compare(bundles["gpt2"], folder).failures
    finally:
        edit(manifest, generation=generation)
    assert [failure.split(" is ")[0].rpartition(".")[2] for failure in failures] == list(wrong)


def test_a_missing_file_of_settings_is_found(packaged: Package, bundles: Mapping[str, Path]) -> None:
    folder = packaged("transformers.js", "dates")
    (folder / "generation_config.json").unlink()
    failures = compare(bundles["dates"], folder).failures
    assert "generation_config.json: decoder_start_token_id is None, the bundle's is 0" in failures


def test_a_continuation_that_ends_early_is_found(packaged: Package, bundles: Mapping[str, Path]) -> None:
    folder = packaged("genai", "gpt2")
    config = folder / "genai_config.json"
    search = json.loads(config.read_text())["search"]
    edit(config, search={**search, "max_length": 52})
    failures = run_by_settings("genai", bundles["gpt2"], folder)
    assert "new token 4 is the first to differ" in failures[0]  # its prompt has 48 tokens


def test_another_end_token_is_found(packaged: Package, bundles: Mapping[str, Path]) -> None:
    """It is one of a text's first tokens."""
    folder = packaged("genai", "gpt2")
    opened = Bundle.open(bundles["gpt2"])
    (check,) = list_default_checks(opened, find_decider(opened, folder))
    with load(bundles["gpt2"], backend="ort-cpu", precision="fp32") as model:
        assert isinstance(model, TextGenerator)
        token = model.generate(check.questions[0]["texts"][0], max_new_tokens=8).token_ids[5]
    config = json.loads((folder / "genai_config.json").read_text())
    edit(folder / "genai_config.json", model={**config["model"], "eos_token_id": [token]})
    failures = run_by_settings("genai", bundles["gpt2"], folder)
    assert "is the first to differ" in failures[0]


def test_a_translation_that_ends_early_is_found(packaged: Package, bundles: Mapping[str, Path]) -> None:
    folder = packaged("transformers.js", "dates")
    edit(folder / "generation_config.json", max_new_tokens=2)
    failures = run_by_settings("transformers.js", bundles["dates"], folder)
    assert "new token 2 is the first to differ" in failures[0]


def test_labels_that_are_exchanged_are_found(packaged: Package, bundles: Mapping[str, Path]) -> None:
    folder = packaged("transformers.js", "classifier")
    edit(folder / "config.json", id2label=ROTATED)
    failures = run_by_settings("transformers.js", bundles["classifier"], folder)
    assert "has the label 'LABEL_" in failures[0]


REPOSITORY = [
    ("classifier", "NAME", 'name: "NAME"', 'name: "other"', "its name is 'other', and its folder's '"),
    ("classifier", "NAME", '"python"', '"pyton"', "backend 'pyton' is not one of python, onnxruntime"),
    ("classifier", "NAME", '"RESULT"', '"ANSWER"', "it has no output RESULT, only ANSWER"),
    (
        "classifier",
        "NAME",
        '"RESULT", data_type: TYPE_STRING',
        '"RESULT", data_type: TYPE_FP32',
        "RESULT is TYPE_FP32 .* the model's is object",
    ),
    ("classifier", "NAME", '"TEXT"', '"TXT"', "it has no input TEXT, only TXT"),
    (
        "classifier",
        "NAME_graph",
        "TYPE_INT64, dims: [-1, -1]",
        "TYPE_BOOL, dims: [7]",
        "input_ids is TYPE_BOOL .* the graph's is tensor.int64",
    ),
    ("gpt2", "NAME", "decoupled: true", "decoupled: false", "decoupled is for a model that sends"),
]
BATCHING = [
    ("dynamic_batching { max_queue_delay_microseconds: 500 }", "", "dynamic_batching is False"),
    ("KIND_CPU", "KIND_GPU", r"instance_group is \['KIND_GPU'\]"),
    ('"auto"', '"ort-cpu"', "backend is 'ort-cpu'"),
    (", optional: true", "", "OPTIONS is optional is False"),
]


@pytest.mark.parametrize(("text", "fault", "message"), BATCHING)
def test_how_a_repository_s_requests_are_answered_is_read_back(
    text: str, fault: str, message: str, packaged: Package, bundles: Mapping[str, Path]
) -> None:
    folder = packaged("triton", "classifier")
    change_text(folder / bundles["classifier"].name / "config.pbtxt", text, fault)
    (failure,) = compare(bundles["classifier"], folder).failures
    assert re.search(message, failure), failure


@pytest.mark.parametrize(("name", "model", "text", "fault", "message"), REPOSITORY)
def test_a_repository_s_configuration_is_held_to_its_models(
    name: str,
    model: str,
    text: str,
    fault: str,
    message: str,
    packaged: Package,
    bundles: Mapping[str, Path],
) -> None:
    folder = packaged("triton", name)
    path = folder / model.replace("NAME", bundles[name].name) / "config.pbtxt"
    change_text(path, text.replace("NAME", bundles[name].name), fault)
    with pytest.raises(VerificationError, match=message):
        run("triton", bundles[name], folder)


def test_batches_of_a_repository_are_those_of_the_graph(
    packaged: Package, bundles: Mapping[str, Path]
) -> None:
    folder = packaged("triton", "classifier")
    path = folder / bundles["classifier"].name / "config.pbtxt"
    path.write_text(path.read_text().replace("max_batch_size: ", "max_batch_size: 9999 # "))
    assert "max_batch_size is 9999" in run("triton", bundles["classifier"], folder)["settings"]


def test_a_repository_s_graph_is_run(packaged: Package, bundles: Mapping[str, Path]) -> None:
    folder = packaged("triton", "classifier")
    (graph,) = folder.glob("*_graph/1/model.onnx")
    graph.write_bytes(b"no graph")
    with pytest.raises(VerificationError, match=r"exit code 1: .*model\.onnx"):
        run("triton", bundles["classifier"], folder)


def test_a_reader_that_embeds_is_found(
    bundles: Mapping[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton, "choose_task", lambda bundle: "embed")
    folder = write_package("triton", bundles["reader"], tmp_path / "P")
    with pytest.raises(VerificationError, match="it has no input CONTEXT"):
        run("triton", bundles["reader"], folder)


def test_heads_that_triton_cannot_offer_are_refused_by_name(
    bundles: Mapping[str, Path], tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(bundles["reader"], tmp_path / "B", copy_function=os.link))
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest["encoder"]["heads"] = ["depth_estimation"]
    (copy / "manifest.json").unlink()
    (copy / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(InputError, match=r"has the heads depth_estimation; .* support one of sequence_"):
        triton.choose_task(Bundle.open(copy))


def test_a_bundle_without_texts_is_not_verified_by_nothing(
    bundles: Mapping[str, Path], tmp_path: Path
) -> None:
    assert report("texts", 0, []).failures and not report("texts", 1, []).failures
    copy = Path(shutil.copytree(bundles["classifier"], tmp_path / "B", copy_function=os.link))
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest["files"] = {name: v for name, v in manifest["files"].items() if "/texts-" not in name}
    (copy / "manifest.json").unlink()
    (copy / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(VerificationError, match="no texts could be compared"):
        package(copy, tmp_path / "P", runtime="triton", precision=["fp32"])


def test_a_message_shows_where_long_results_differ() -> None:
    got = "a" * 100 + "b" + "c" * 100
    want = "a" * 100 + "d" + "c" * 100
    told = describe_difference(got, want)
    assert "aab" in told and "aad" in told and "from 80 on" in told and len(told) < 200
    assert describe_difference([1, 2], [1, 2, 3]) == "gives [1, 2], wanted is [1, 2, 3]"


@pytest.mark.parametrize(("margin", "tolerated"), [(1e-5, True), (0.1, False)])
def test_an_answer_may_leave_ours_only_where_two_tokens_are_as_likely(margin: float, tolerated: bool) -> None:
    logits = np.array([[0.0, 1.0]], np.float32)
    sample = Sample((1,), (4, 5), (1.0, 1.0), (0,), logits)
    own = OwnAnswer("a b", (4, 5), ({4: -1.0}, {5: -1.0, 6: -1.0 - margin}), sample)
    given = {"tokens": [4, 6], "text": "a c"}
    fault = compare_answers("x", given, own, GenerationDefaults(eos=(0,)), max_error=1e-4)
    assert (fault == "") == tolerated
    early = compare_answers("x", {"tokens": [4, 0, 0], "text": "a"}, own, GenerationDefaults(eos=(0,)), 1e-4)
    assert "new token 1 is the first to differ" in early


def test_config_pbtxt_is_read_or_refused() -> None:
    text = 'name: "a" # why\ninput [{ name: "x", dims: [1, -1], optional: true }]\ninput { name: "y" }\n'
    assert read_pbtxt(text) == {
        "name": "a",
        "input": [{"name": "x", "dims": [1, -1], "optional": True}, {"name": "y"}],
    }
    for fault in ('name: "a" }', 'input [{ name: "x"', "a: 1 a: 2"):
        with pytest.raises(ValueError, match=r"config\.pbtxt: "):
            read_pbtxt(fault)
