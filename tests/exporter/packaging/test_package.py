"""What a package is made of, what is refused, and what is left behind; no other runtime is needed."""

from __future__ import annotations

import importlib.metadata
import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st
from sentence_transformers.sentence_transformer.modules import Pooling
from tokenizers import Tokenizer

from planforge.exporter import export, package
from planforge.exporter.checkpoints.source import find_demo
from planforge.exporter.errors import OutputError, VerificationError
from planforge.exporter.packaging import recipes
from planforge.exporter.packaging import worker as packaging_worker
from planforge.exporter.packaging.transformers_js import lower_every_sigma
from planforge.exporter.packaging.worker import Worker, find_node, find_python
from planforge.models.sentence_transformers import read_modules
from planforge.runtime import InputError, IntegrityError

from ...helpers.cli import planforge
from ...helpers.llamas import shallow_llama
from ...helpers.models import edit_json

RUNTIMES = ("genai", "transformers.js", "optimum", "triton")


def list_files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_hard_links_are_made_if_asked_for_and_little_else_is_written(
    runtime: str, llama_demo_bundle: Path, tmp_path: Path
) -> None:
    bundle = Path(shutil.copytree(llama_demo_bundle, tmp_path / "B"))  # whose files get second names
    before = {path: path.read_bytes() for path in bundle.rglob("*") if path.is_file()}
    result = package(
        bundle, tmp_path / "P", runtime=runtime, precision=["int8"], hard_links=True, verify=False
    )
    weights = next(bundle.glob("onnx/weights.int8-*.data"))
    links = [path for path in (tmp_path / "P").rglob("*") if path.is_file() and path.samefile(weights)]
    assert len(links) == 1
    assert result.bytes_written < 200_000 < weights.stat().st_size
    assert result.version is None and not result.verified
    assert before == {path: path.read_bytes() for path in bundle.rglob("*") if path.is_file()}


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_onnx_loads_the_bundle_and_the_package_afterwards(
    runtime: str, llama_demo_bundle: Path, tmp_path: Path
) -> None:
    """It refuses weights that have a second name, as an attack."""
    bundle = Path(shutil.copytree(llama_demo_bundle, tmp_path / "B"))
    result = package(bundle, tmp_path / "P", runtime=runtime, precision=["int8"], verify=False)
    graphs = [*bundle.rglob("*.onnx"), *(tmp_path / "P").rglob("*.onnx")]
    assert len(graphs) > len(list(bundle.rglob("*.onnx")))
    for graph in graphs:
        onnx.load(graph)
    on_disk = sum(path.stat().st_size for path in (tmp_path / "P").rglob("*") if path.is_file())
    assert result.shared or result.bytes_written == on_disk


def test_what_a_package_is_stands_in_it(llama_demo_bundle: Path, tmp_path: Path) -> None:
    result = package(llama_demo_bundle, tmp_path / "P", runtime="genai", verify=False)
    told = json.loads((tmp_path / "P/planforge.json").read_text())
    manifest = json.loads((llama_demo_bundle / "manifest.json").read_text())
    assert told["export_id"] == manifest["export_id"]
    assert told["artifacts"] == list(result.artifacts) == ["decoder.ort.fp32"]
    assert told["run_with"] is None and told["comparisons"] == []
    for number, precision in enumerate(("int8", ["int8", "int8"])):  # one name, and one twice
        folder = tmp_path / str(number)
        again = package(llama_demo_bundle, folder, runtime="genai", precision=precision, verify=False)
        assert again.artifacts == ("decoder.ort.int8",)


def test_a_package_for_javascript_has_all_precisions(llama_demo_bundle: Path, tmp_path: Path) -> None:
    package(llama_demo_bundle, tmp_path / "P", runtime="transformers.js", verify=False)
    names = {f"onnx/model{suffix}.onnx{data}" for suffix in ("", "_int8", "_q4") for data in ("", "_data")}
    assert names <= list_files(tmp_path / "P")
    config = json.loads((tmp_path / "P/config.json").read_text())
    assert config["transformers.js_config"]["use_external_data_format"] == {
        f"model{suffix}.onnx": 1 for suffix in ("", "_int8", "_q4")
    }
    for path in (tmp_path / "P").glob("onnx/*.onnx"):
        model = onnx.load(path, load_external_data=False)
        assert {node.op_type for node in model.graph.node}.isdisjoint({"GatherBlockQuantized"})


def test_settings_are_those_of_the_checkpoint(llama_demo_bundle: Path, tmp_path: Path) -> None:
    """As transformers reads both folders; end tokens are not looked at where packages are compared."""
    checkpoint = find_demo("llama-demo")
    package(llama_demo_bundle, tmp_path / "P", runtime="optimum", verify=False)
    own, expected = (transformers.GenerationConfig.from_pretrained(f) for f in (tmp_path / "P", checkpoint))
    assert expected.eos_token_id == [0, 2]
    for name in ("bos_token_id", "eos_token_id", "do_sample", "num_beams", "temperature", "top_k", "top_p"):
        assert getattr(expected, name) in (getattr(own, name), None), name
    reader, reference = (
        transformers.AutoTokenizer.from_pretrained(folder) for folder in (tmp_path / "P", checkpoint)
    )
    assert (reader.bos_token, reader.eos_token) == (reference.bos_token, reference.eos_token)
    assert reader.padding_side == "left" and reader.pad_token_id == own.pad_token_id is not None
    assert reader.model_input_names == ["input_ids", "attention_mask"]  # what `generate` takes
    messages = [{"role": "user", "content": "And God said"}]
    assert reader.apply_chat_template(messages, tokenize=False) == reference.apply_chat_template(
        messages, tokenize=False
    )
    package(llama_demo_bundle, tmp_path / "G", runtime="genai", verify=False)
    model = json.loads((tmp_path / "G/genai_config.json").read_text())["model"]
    assert (model["bos_token_id"], model["eos_token_id"]) == (expected.bos_token_id, expected.eos_token_id)


def test_settings_are_read_as_they_are_meant(
    own_bundle: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Those that a runtime does not know are named, and so is a value of one."""
    path = own_bundle / "manifest.json"
    expected = {"do_sample": True, "temperature": 0.7, "top_k": None, "min_p": 0.1, "no_repeat_ngram_size": 3}
    generation = json.loads(path.read_text())["generation"]
    edit_json(path, generation={**generation, **expected})
    for runtime in ("optimum", "genai", "transformers.js"):
        package(own_bundle, tmp_path / runtime, runtime=runtime, verify=False)
    own = transformers.GenerationConfig.from_pretrained(tmp_path / "optimum").to_diff_dict()
    assert {name: own.get(name) for name in expected} == expected | {"top_k": 0}  # without it would be 50
    search = json.loads((tmp_path / "genai/genai_config.json").read_text())["search"]
    assert search.items() >= {"do_sample": True, "temperature": 0.7, "no_repeat_ngram_size": 3}.items()
    assert (search["top_k"], search["top_p"]) == (0, 1.0)  # without top_p it takes the likeliest token
    assert "min_p" not in search
    told = "does not support the bundle's settings min_p=0.1, and ignores them"
    assert [record.getMessage() for record in caplog.records] == [
        f"onnxruntime-genai {told}",
        f"transformers.js {told}",
    ]
    caplog.clear()
    beams = {"num_beams": 4, "length_penalty": 2.0, "early_stopping": "never", "max_new_tokens": 9}
    further = {
        "bad_words": [[6, 7]],
        "suppress_tokens": [8],
        "sequence_bias": [{"tokens": [9, 3], "added": -2.0}],
        "decay_start": 4,
        "decay_factor": 1.5,
    }
    rules = {"min_new_tokens": 2, "renormalize": True, "suppressed": [5], "stop": ["x"], "rules": further}
    edit_json(path, generation={**generation, **beams, **rules})
    package(own_bundle, tmp_path / "P", runtime="optimum", verify=False)
    own = transformers.GenerationConfig.from_pretrained(tmp_path / "P").to_diff_dict()
    renamed = {
        **{"min_new_tokens": 2, "renormalize_logits": True, "bad_words_ids": [[5], [6, 7]]},
        **{"suppress_tokens": [8], "sequence_bias": [[[9, 3], -2.0]], "stop_strings": ["x"]},
        "exponential_decay_length_penalty": [4, 1.5],
    }
    assert own.items() >= {**beams, **renamed}.items()
    assert caplog.text == ""
    package(own_bundle, tmp_path / "Q", runtime="genai", verify=False)
    search = json.loads((tmp_path / "Q/genai_config.json").read_text())["search"]
    assert search.items() >= {"num_beams": 4, "length_penalty": 2.0, "early_stopping": False}.items()
    unknown = ("early_stopping='never'", "min_new_tokens=2", "max_new_tokens=9", "renormalize_logits=True")
    assert f" settings {', '.join(unknown)}, bad_words_ids=[[5], [6, 7]], suppress_tokens=[8]," in caplog.text


@pytest.mark.parametrize("name", ["opt", "qwen2"])
def test_sizes_of_a_decoder_that_was_imported(
    name: str, exported: Path, imported: Callable[[str], Path], tmp_path: Path
) -> None:
    """They are those of its checkpoint, though the bundle's config has other names, and not all of them."""
    for runtime in ("optimum", "genai"):
        package(imported(name), tmp_path / runtime, runtime=runtime, verify=False)
    expected = transformers.AutoConfig.from_pretrained(exported / name)
    own = transformers.AutoConfig.from_pretrained(tmp_path / "optimum")
    decoder = json.loads((tmp_path / "genai/genai_config.json").read_text())["model"]["decoder"]
    for size in ("num_hidden_layers", "num_attention_heads", "hidden_size"):
        assert getattr(own, size) == getattr(expected, size) == decoder[size]
    groups = getattr(expected, "num_key_value_heads", expected.num_attention_heads)
    assert own.num_key_value_heads == decoder["num_key_value_heads"] == groups
    assert own.head_dim == decoder["head_size"] == expected.hidden_size // expected.num_attention_heads


def test_a_begin_token_for_genai_is_asked_for(imported: Callable[[str], Path], tmp_path: Path) -> None:
    genai = pytest.importorskip("onnxruntime_genai")
    assert package(imported("llama"), tmp_path / "P", runtime="genai").verified
    tokenizer = genai.Tokenizer(genai.Model(str(tmp_path / "P")))
    plain = tokenizer.encode("In the beginning").tolist()
    tokenizer.update_options(add_special_tokens="true")
    reference = transformers.AutoTokenizer.from_pretrained(tmp_path / "P")
    assert tokenizer.encode("In the beginning").tolist() == reference("In the beginning").input_ids
    assert reference("In the beginning").input_ids == [0, *plain]


def test_how_a_vector_is_made_is_told_as_sentence_transformers_does(
    minilm_bundle: Path, tmp_path: Path
) -> None:
    bundle = Path(shutil.copytree(minilm_bundle, tmp_path / "B"))
    encoder = json.loads((bundle / "manifest.json").read_text())["encoder"]
    prompts = {"query": "query: ", "text": "passage: "}
    edit_json(bundle / "manifest.json", encoder=encoder | {"prompts": prompts, "default_prompt": "text"})
    expected = read_modules(find_demo("bert-demo"))
    assert expected is not None and expected.sentence is not None
    assert expected.sentence.pooling == ("mean",) and expected.sentence.normalize
    for runtime in ("optimum", "transformers.js"):
        folder = tmp_path / runtime
        package(bundle, folder, runtime=runtime, verify=False)
        own = read_modules(folder)
        assert own is not None
        assert (own.sentence, own.max_seq_length) == (expected.sentence, expected.max_seq_length)
        assert (own.prompts, own.default_prompt) == (prompts, "text")
        pooling = Pooling.load(str(folder), subfolder="1_Pooling")
        found = pooling.get_config_dict()
        assert (found["pooling_mode"], found["embedding_dimension"]) == ("mean", 384)


def test_labels_are_those_of_the_checkpoint(head_bundle: Callable[[str], Path], tmp_path: Path) -> None:
    bundle = head_bundle("classifier")
    package(bundle, tmp_path / "P", runtime="optimum", precision=["fp32"], verify=False)
    own, expected = (
        transformers.AutoConfig.from_pretrained(f) for f in (tmp_path / "P", bundle.parent / "classifier")
    )
    assert own.id2label == expected.id2label and len(own.id2label) == 3
    assert own.architectures == expected.architectures == ["BertForSequenceClassification"]
    assert (own.model_type, own.pad_token_id) == (expected.model_type, expected.pad_token_id)


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_graphs_are_sound_by_onnx(runtime: str, demo_bundle: Path, tmp_path: Path) -> None:
    package(demo_bundle, tmp_path / "P", runtime=runtime, verify=False)
    paths = list((tmp_path / "P").rglob("model*.onnx"))
    assert bool(paths) == (runtime != "triton")  # which has the bundle itself
    for path in paths:
        onnx.checker.check_model(path)  # it would refuse links
    assert all(path.stat().st_nlink == 1 for path in (tmp_path / "P").rglob("*") if path.is_file())


REFUSED = [
    ("genai", None, "minilm_bundle", "takes text-generation; .* is a bundle for text-encoding"),
    ("optimum", None, "dates_bundle", "is a bundle for translation"),
    ("transformers.js", None, "marian_bundle", "has MarianMT's tokenizers, .*: package it with --for triton"),
    ("genai", ["fp32-kv8"], "llama_demo_bundle", "takes fp32, fp16, int8, int4"),
    ("genai", ["fp16"], "llama_demo_bundle", "--precision fp32,int8,int4,fp16 --target cpu,cuda"),
    ("genai", ["in8"], "llama_demo_bundle", "did you mean 'int8'"),
    ("genai", ["fp32", "int8"], "llama_demo_bundle", "has one precision, not fp32, int8"),
    ("gen-ai", None, "llama_demo_bundle", "is not one of genai, .*; did you mean 'genai'"),
]


def test_a_head_that_a_runtime_has_no_class_for(
    head_bundle: Callable[[str], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bundle = Path(shutil.copytree(head_bundle("pretrained"), tmp_path / "B"))
    package(bundle, tmp_path / "P", runtime="optimum", precision=["fp32"], verify=False)
    assert "leaves out next_sentence" in caplog.text
    manifest = bundle / "manifest.json"
    encoder = json.loads(manifest.read_text())["encoder"]
    edit_json(manifest, encoder={**encoder, "heads": ["next_sentence"]})
    with pytest.raises(InputError, match="not support the head next_sentence; package it with --for triton"):
        package(bundle, tmp_path / "Q", runtime="optimum", precision=["fp32"], verify=False)


@pytest.mark.parametrize(("runtime", "precision", "bundle", "why"), REFUSED)
def test_what_a_runtime_does_not_take_is_told_with_the_way_out(
    runtime: str,
    precision: list[str] | None,
    bundle: str,
    why: str,
    request: pytest.FixtureRequest,
    tmp_path: Path,
) -> None:
    with pytest.raises(InputError, match=why):
        package(request.getfixturevalue(bundle), tmp_path / "P", runtime=runtime, precision=precision)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("has", "source", "advice"),
    [
        ("fp32", {}, "export gpt2-demo .* --precision fp32 --target portable,rtx,cpu "),
        ("fp16", {}, "export gpt2-demo .* --precision fp16 --target portable,rtx,cuda "),
        ("fp32", {"exporter": "optimum"}, "import FOLDER --source gpt2-demo .* --target portable,rtx,cpu "),
    ],
)
def test_a_bundle_without_graphs_of_the_dialect_is_exported_again(
    has: str, source: dict[str, str], advice: str, own_bundle: Path, tmp_path: Path
) -> None:
    path = own_bundle / "manifest.json"
    manifest = json.loads(path.read_text())
    others = [one for one in manifest["artifacts"] if one["dialect"] != "ort" and one["precision"] == has]
    edit_json(path, artifacts=others, plans=[], default_precision=has, source=manifest["source"] | source)
    with pytest.raises(InputError, match=rf"has decoder\.\w+\.{has}.*: export it again: `planforge {advice}"):
        package(own_bundle, tmp_path / "P", runtime="genai")


def test_layers_that_keep_the_newest_tokens_alone_are_refused(
    tmp_path: Path,
) -> None:
    shallow_llama(tmp_path / "gemma", "gemma 3", max_position_embeddings=1024)
    export(tmp_path / "gemma", tmp_path / "B", target=["cpu"], precision=["fp32"], verify=False)
    with pytest.raises(InputError, match="not support caches of two lengths"):
        package(tmp_path / "B", tmp_path / "P", runtime="genai", verify=False)


def test_a_folder_with_anything_in_it_is_left_alone(demo_bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "P").mkdir()
    (tmp_path / "P/own").write_text("mine")
    with pytest.raises(OutputError, match="is not empty; name another folder, or empty this one"):
        package(demo_bundle, tmp_path / "P", runtime="genai", verify=False)
    assert list_files(tmp_path) == {"P/own"}
    (tmp_path / "P/own").unlink()
    package(demo_bundle, tmp_path / "P", runtime="genai", verify=False)
    assert "model.onnx" in list_files(tmp_path / "P")


def test_a_folder_that_is_none_or_the_bundle_s_is_refused(own_bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("empty")
    (tmp_path / "file").write_text("mine")
    for folder, why in (
        (tmp_path / "link", "is a symbolic link; name the folder that it leads to"),
        (tmp_path / "file", "exists and is not a folder"),
        (tmp_path / "file/P", "is not a writable folder"),
        (own_bundle / "P", "is in the bundle .*; name a folder outside of it"),
        (own_bundle, "is in the bundle"),
        (tmp_path, "has the bundle .* in it; name another folder"),
    ):
        with pytest.raises(OutputError, match=why):
            package(own_bundle, folder, runtime="genai", verify=False)


def test_a_damaged_bundle_is_not_packaged(own_bundle: Path, tmp_path: Path) -> None:
    weights = next(own_bundle.glob("onnx/weights.fp32-*.data"))
    data = bytearray(weights.read_bytes())
    data[1000] ^= 1
    weights.write_bytes(data)
    with pytest.raises(IntegrityError):
        package(own_bundle, tmp_path / "P", runtime="genai", verify=False)
    assert not (tmp_path / "P").exists()
    (tmp_path / "P/own").mkdir(parents=True)
    with pytest.raises(OutputError, match="is not empty"):  # before its files are read
        package(own_bundle, tmp_path / "P", runtime="genai", verify=False)


def test_a_runtime_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_python("ask_genai.py", "no_such_runtime", "no-such", None) is None
    assert find_python("ask_optimum.py", "no_such.runtime", "no-such", None) is None
    with pytest.raises(InputError, match=r"venv is not a program: give a python, such as venv/bin/python"):
        find_python("ask_genai.py", "no_such_runtime", "no-such", tmp_path / "venv")
    with pytest.raises(InputError, match=r"/true has no no-such installed"):
        find_python("ask_genai.py", "no_such_runtime", "no-such", Path(str(shutil.which("true"))))
    (tmp_path / "waits").write_text("#!/bin/sh\nexec sleep 60\n")
    (tmp_path / "waits").chmod(0o755)
    with monkeypatch.context() as patch, pytest.raises(InputError, match="waits has no no-such installed"):
        patch.setattr(packaging_worker, "PROBE_SECONDS", 0.1)
        find_python("ask_genai.py", "no_such_runtime", "no-such", tmp_path / "waits")
    here = find_python("ask_triton.py", "planforge.runtime", "planforge", None)
    assert here is not None and here.command[0] == sys.executable
    assert here.version == importlib.metadata.version("planforge")
    assert find_python("ask_triton.py", "planforge.runtime", "planforge", Path(sys.prefix)) is not None
    with pytest.raises(InputError, match=r"@huggingface/transformers|node is not installed"):
        find_node("ask_transformers_js.mjs", tmp_path)


def test_a_runtime_that_is_too_old_is_refused(
    demo_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = Worker(("false",), {}, "0.9.2.dev1")
    recipe = replace(recipes.RECIPES["genai"], find=lambda _: worker)
    monkeypatch.setitem(recipes.RECIPES, "genai", recipe)
    with pytest.raises(
        InputError, match=r"onnxruntime-genai 0\.9\.2\.dev1 is too old: packages need 0\.12\.2"
    ):
        package(demo_bundle, tmp_path / "P", runtime="genai")
    assert not list(tmp_path.iterdir())
    assert package(demo_bundle, tmp_path / "P", runtime="genai", verify=False).version is None


NORMALIZERS: list[dict[str, Any]] = [
    {"type": "Lowercase"},
    {"type": "Sequence", "normalizers": [{"type": "NFKC"}, {"type": "Lowercase"}]},
    {
        "type": "BertNormalizer",
        "clean_text": True,
        "handle_chinese_chars": True,
        "strip_accents": None,
        "lowercase": True,
    },
]


@pytest.mark.parametrize("normalizer", NORMALIZERS)
@given(text=st.text(st.characters(exclude_categories=["Cs"])) | st.text("ΟΔΟΣσςΣ𝚺 AbÉ"))
def test_a_tokenizer_for_javascript_reads_what_the_bundle_s_reads(
    normalizer: dict[str, Any], text: str
) -> None:
    tokenizer = {
        "normalizer": normalizer,
        "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"},
    }
    one, other = (Tokenizer.from_str(json.dumps(t)) for t in (tokenizer, lower_every_sigma(tokenizer)))
    assert one.normalizer.normalize_str(text) == other.normalizer.normalize_str(text)


def test_a_package_that_was_not_run_says_so(
    demo_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    recipe = replace(recipes.RECIPES["genai"], find=lambda _: None)
    monkeypatch.setitem(recipes.RECIPES, "genai", recipe)
    result = package(demo_bundle, tmp_path / "P", runtime="genai")
    assert not result.verified and result.version is None
    assert "is not installed here, so the package is not run: install it (`pip" in caplog.text
    assert "(`pip install onnxruntime-genai`), or pass --runtime-at" in caplog.text


def test_a_runtime_that_fails_leaves_nothing(
    demo_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fails = ("sh", "-c", "echo 'RuntimeError: no such operator' >&2; exit 3", "sh")
    worker = Worker(fails, {}, "1.0")
    recipe = replace(recipes.RECIPES["genai"], find=lambda _: worker)
    monkeypatch.setitem(recipes.RECIPES, "genai", recipe)
    with pytest.raises(VerificationError, match="exit code 3: RuntimeError: no such operator"):
        package(demo_bundle, tmp_path / "P", runtime="genai")
    assert not list(tmp_path.iterdir())


def test_the_command_prints_what_was_made(demo_bundle: Path, tmp_path: Path) -> None:
    command = ("package", demo_bundle, "--for", "genai", "--no-verify", "-o")
    told = json.loads(planforge(*command, tmp_path / "P", "--json").stdout)
    assert told["runtime"] == "genai" and told["artifacts"] == ["decoder.ort.fp32"]
    written = planforge(*command, tmp_path / "Q").stdout
    assert "run with  nothing: it was not run" in written
    bundle = Path(shutil.copytree(demo_bundle, tmp_path / "B"))
    linked = planforge("package", bundle, *command[2:], tmp_path / "R", "--hard-links").stdout
    assert "kB plus 2 files shared with the bundle" in linked  # the weights and the tokenizer
    again = planforge(*command, tmp_path / "Q")
    assert again.returncode == 1 and again.stdout == ""
    assert "is not empty" in again.stderr.splitlines()[-1]
