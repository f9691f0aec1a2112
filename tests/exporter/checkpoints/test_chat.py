"""A checkpoint's chat template from its files to a bundle, and `planforge run --chat`."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from planforge.exporter import export
from planforge.exporter.checkpoints.chat_template import read_chat_template
from planforge.exporter.checkpoints.checkpoint import Checkpoint
from planforge.exporter.checkpoints.source import DEMOS, Source
from planforge.exporter.verification.derivation import compare_templates
from planforge.runtime import TextGenerator, load
from planforge.runtime.bundle.bundle import Bundle
from planforge.runtime.errors import BundleError, IntegrityError, ManifestError
from planforge.runtime.text.chat import MAX_BYTES

from ...conftest import Once
from ...helpers.chat import CHATML, HERMES, KINDS, LLAMA, MISTRAL, ROLES, load_reference
from ...helpers.cli import error_line, planforge
from ...helpers.models import edit_json, greedy
from ...helpers.modules import modules_after
from ...helpers.optimums import OPTIMUM_PYTHON
from ...helpers.selftest import mend

# In a style that gpt2-demo, which knows the King James Bible alone, goes on with.
BIBLE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}\n"
    "{% elif m.role == 'user' %}And he said, {{ m.content }}\n"
    "{% else %}And they answered,{{ m.content }}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}And they answered,{% endif %}"
)
MESSAGES = [
    {"role": "system", "content": "In those days there was no king."},
    {"role": "user", "content": "Where is the ark?"},
    {"role": "assistant", "content": " It is in the house."},
    {"role": "user", "content": "Whose house?"},
]
SHORT = ["--max-new-tokens", "12"]


@pytest.fixture(scope="session")
def checkpoint(once: Callable[[str], Once]) -> Path:
    """gpt2-demo with a template, and beside it "bundle", its export, not verified. Don't change them."""
    with once("chat") as (folder, first):
        if first:
            shutil.copytree(DEMOS / "gpt2-demo", folder / "checkpoint")
            edit_json(folder / "checkpoint" / "tokenizer_config.json", chat_template=BIBLE)
            how: dict[str, Any] = {"precision": ["fp32"], "target": ["cpu"], "verify": False}
            export(folder / "checkpoint", folder / "bundle", **how)
    return folder / "checkpoint"


@pytest.fixture
def bundle(checkpoint: Path) -> Path:
    return checkpoint.parent / "bundle"


@pytest.fixture
def own(bundle: Path, tmp_path: Path) -> Path:
    """A copy of the bundle to damage."""
    return Path(shutil.copytree(bundle, tmp_path / "bundle"))


def write_tokenizer(folder: Path, template: Any, as_file: bool) -> Any:
    """Writes a tokenizer's files as transformers does; what it reads back from them."""
    tokenizer = load_reference("byte_level")
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder, save_jinja_files=as_file)
    tokenizer.chat_template = None
    return transformers.AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("as_file", [True, False])
@pytest.mark.parametrize("several", [True, False])
def test_the_template_is_the_one_that_transformers_reads(
    as_file: bool, several: bool, tmp_path: Path
) -> None:
    given = {"default": MISTRAL, "other": CHATML} if several else LLAMA
    read = write_tokenizer(tmp_path, given, as_file)
    assert (tmp_path / "chat_template.jinja").is_file() == as_file
    found = read_chat_template([tmp_path])
    assert found is not None
    assert found.contents["file"].decode() == read.get_chat_template() == (MISTRAL if several else LLAMA)
    assert found.tokens == read.special_tokens_map == {**ROLES, "unk_token": "<unk>"}


@pytest.mark.parametrize("as_file", [True, False])
def test_tools_have_the_template_that_transformers_takes(as_file: bool, tmp_path: Path) -> None:
    read = write_tokenizer(tmp_path, {"default": CHATML, "tool_use": HERMES, "rag": "x"}, as_file)
    assert (tmp_path / "additional_chat_templates" / "tool_use.jinja").is_file() == as_file
    found = read_chat_template([tmp_path])
    assert found is not None
    assert {name: content.decode() for name, content in found.contents.items()} == {
        "file": read.get_chat_template(),
        "tool_use": read.get_chat_template(tools=[]),
    }


def test_what_an_older_processor_wrote_counts_last(tmp_path: Path) -> None:
    """AutoProcessor reads chat_template.json where nothing else has a template."""
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": LLAMA}), encoding="utf-8")
    found = read_chat_template([tmp_path])
    assert found is not None and found.contents["file"].decode() == LLAMA
    write_tokenizer(tmp_path, CHATML, as_file=False)
    found = read_chat_template([tmp_path])
    assert found is not None and found.contents["file"].decode() == CHATML


def test_the_file_wins_over_the_settings(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, LLAMA, as_file=False)
    (tmp_path / "chat_template.jinja").write_text(CHATML, encoding="utf-8")
    found = read_chat_template([tmp_path])
    assert found is not None and found.contents["file"].decode() == CHATML
    assert transformers.AutoTokenizer.from_pretrained(tmp_path).chat_template == CHATML


def test_extra_tokens_have_the_names_that_transformers_gives_them(tmp_path: Path) -> None:
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=KINDS["byte_level"](), extra_special_tokens={"turn_token": "<|eot_id|>"}, **ROLES
    )
    tokenizer.chat_template = "{{ turn_token }}"
    tokenizer.save_pretrained(tmp_path)
    found = read_chat_template([tmp_path])
    again: Any = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert found is not None and found.tokens == again.special_tokens_map
    assert found.tokens["turn_token"] == "<|eot_id|>"


def test_what_optimum_left_out_comes_from_the_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "graphs").mkdir()
    write_tokenizer(tmp_path / "source", LLAMA, as_file=True)
    found = read_chat_template([tmp_path / "graphs", tmp_path / "source"])
    assert found is not None and (found.contents["file"].decode(), found.tokens["bos_token"]) == (
        LLAMA,
        "<s>",
    )
    (tmp_path / "graphs" / "chat_template.jinja").write_text(CHATML, encoding="utf-8")
    found = read_chat_template([tmp_path / "graphs", tmp_path / "source"])
    assert found is not None and found.contents["file"].decode() == CHATML
    assert read_chat_template([tmp_path]) is None


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{% for", "line 1: the chat template is not a valid Jinja template"),
        ("x" * (MAX_BYTES + 1), "it has 1048577 bytes; at most 1048576"),
        ([{"name": "tool_use", "template": "x"}], "'tool_use'.* none is 'default'"),
        ([{"name": "default", "template": 1}], "chat_template must be a string, not int"),
        ({"default": "x"}, "chat_template must be a string, not dict"),
    ],
)
def test_a_template_that_cannot_be_used_is_left_out(
    template: Any, words: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}), encoding="utf-8")
    assert read_chat_template([tmp_path]) is None
    assert re.search(words, caplog.text)
    assert f"{tmp_path}: the chat template is left out: " in caplog.text


def test_a_file_that_is_no_text_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    assert read_chat_template([tmp_path]) is None
    assert "is left out: 'utf-8' codec" in caplog.text


def test_a_bundle_says_where_its_template_is(bundle: Path) -> None:
    manifest = Bundle.open(bundle).manifest
    template = manifest.tokenizer["chat_template"]
    assert (bundle / template["file"]).read_text(encoding="utf-8") == BIBLE
    assert template["file"].startswith("tokenizer/chat_template-") and template["file"] in manifest.files
    assert template["tokens"] == {f"{role}_token": "<|endoftext|>" for role in ("bos", "eos", "unk")}


def test_a_bundle_keeps_the_template_for_tools(checkpoint: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(checkpoint, tmp_path / "checkpoint"))
    named = [{"name": "default", "template": BIBLE}, {"name": "tool_use", "template": HERMES}]
    edit_json(folder / "tokenizer_config.json", chat_template=named)
    bundle = tmp_path / "bundle"
    export(folder, bundle, precision=["fp32"], target=["cpu"], verify=False)
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
    tools = [{"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}]
    with TextGenerator.load(bundle) as model:
        assert model.has_tools
        asked: list[dict[str, Any]] = [{}, {"tools": tools}]
        for options in asked:
            prompt = tokenizer.apply_chat_template(
                MESSAGES, add_generation_prompt=True, return_dict=False, **options
            )
            answer = model.chat(MESSAGES, max_new_tokens=4, **options)
            assert list(answer.token_ids) == list(model.generate(prompt, max_new_tokens=4).token_ids)
    opened = Bundle.open(bundle)
    recorded = opened.manifest.tokenizer["chat_template"]
    assert (bundle / recorded["tool_use"]).read_text(encoding="utf-8") == HERMES
    derived = Checkpoint(Source("folder", str(checkpoint), checkpoint))
    assert compare_templates(opened, derived)[1] == [
        "tokenizer.chat_template: the bundle alone has a template 'tool_use'"
    ]
    (bundle / recorded["tool_use"]).write_text("other")
    with pytest.raises(IntegrityError, match=r"tool_use-.*jinja has 5 bytes"):
        TextGenerator.load(bundle)


def test_the_answer_is_that_of_transformers(checkpoint: Path, bundle: Path) -> None:
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(checkpoint)
    reference = transformers.GPT2LMHeadModel.from_pretrained(checkpoint, dtype=torch.float32).eval()
    prompt = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
    assert prompt[0] == 0 and len(set(prompt)) > 20
    with TextGenerator.load(bundle) as model:
        answer = model.chat(MESSAGES, max_new_tokens=24)
        assert list(answer.token_ids) == greedy(reference, prompt, 24)
        assert "".join(map(str, model.stream_chat(MESSAGES, max_new_tokens=24))) == answer.text


@pytest.mark.skipif(not OPTIMUM_PYTHON.exists(), reason="needs make build/optimum-venv/.ready")
def test_a_template_comes_along_through_optimum(checkpoint: Path, bundle: Path, tmp_path: Path) -> None:
    how: dict[str, Any] = {"precision": ["fp32"], "target": ["portable"], "verify": False}
    export(checkpoint, tmp_path / "bundle", exporter="optimum", optimum_python=str(OPTIMUM_PYTHON), **how)
    opened = Bundle.open(tmp_path / "bundle")
    template = opened.manifest.tokenizer["chat_template"]
    assert (opened.folder / template["file"]).read_text(encoding="utf-8") == BIBLE
    assert template["tokens"]["bos_token"] == "<|endoftext|>"
    with TextGenerator.load(opened.folder) as imported, TextGenerator.load(bundle) as model:
        wanted = model.chat(MESSAGES, max_new_tokens=12).token_ids
        assert imported.chat(MESSAGES, max_new_tokens=12).token_ids == wanted


def test_generating_without_messages_loads_no_jinja2(bundle: Path) -> None:
    code = f"from planforge.runtime import load\nmodel = load({str(bundle)!r})\n"
    assert "jinja2" not in modules_after(code + "model.generate('In the', max_new_tokens=2)")
    loaded = modules_after(code + f"model.chat({MESSAGES!r}, max_new_tokens=2)")
    assert "jinja2" in loaded and not loaded & {"torch", "transformers", "onnx", "typer", "rich"}


def test_a_template_that_changed_is_refused(own: Path) -> None:
    file = Bundle.open(own).manifest.tokenizer["chat_template"]["file"]
    (own / file).write_text(BIBLE.replace("Where", "There").replace("he", "we"), encoding="utf-8")
    with pytest.raises(IntegrityError, match=r"chat_template-.*jinja has changed"):
        load(own)
    (own / file).write_bytes(b"\xff")
    mend(own, file)
    with pytest.raises(
        BundleError, match=r"chat_template-.*jinja is not a valid chat template: 'utf-8' codec"
    ):
        TextGenerator.load(own)
    (own / file).write_text("{% if")
    mend(own, file)
    with TextGenerator.load(own) as model:
        assert model.generate("And", max_new_tokens=1).token_ids
        with pytest.raises(
            BundleError, match=r"chat_template-.*jinja, line 1: the chat template is not a valid"
        ):
            model.chat(MESSAGES)
    (own / file).write_text("x" * (MAX_BYTES + 1))
    mend(own, file)
    with pytest.raises(BundleError, match="it has 1048577 bytes; at most 1048576 are allowed"):
        load(own)


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"file": "../secret", "tokens": {}}, "uses '../secret' without listing its hash"),
        ({"file": 1, "tokens": {}}, "tokenizer.chat_template.file must be str"),
        ({"tokens": {}}, "tokenizer.chat_template.file must be str, but is missing"),
        ("tokenizer/x.jinja", "tokenizer.chat_template must be an object"),
    ],
)
def test_a_manifest_that_names_no_template_of_its_own_is_refused(own: Path, entry: Any, words: str) -> None:
    manifest = json.loads((own / "manifest.json").read_text(encoding="utf-8"))
    edit_json(own / "manifest.json", tokenizer={**manifest["tokenizer"], "chat_template": entry})
    with pytest.raises(ManifestError, match=words):
        load(own)


def test_run_answers_each_argument_as_a_conversation_of_its_own(bundle: Path) -> None:
    system = ["--system", MESSAGES[0]["content"]]
    done = planforge("run", bundle, "Where is the ark?", "Whose house?", "--chat", *system, *SHORT, "--json")
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    with TextGenerator.load(bundle) as model:
        wanted = [
            model.chat([MESSAGES[0], {"role": "user", "content": text}], max_new_tokens=12)
            for text in ("Where is the ark?", "Whose house?")
        ]
    assert [answer["prompt"] for answer in answers] == ["Where is the ark?", "Whose house?"]
    assert [answer["token_ids"] for answer in answers] == [list(answer.token_ids) for answer in wanted]
    assert wanted[0].token_ids != wanted[1].token_ids
    shown = planforge("run", bundle, "Where is the ark?", "--chat", *system, *SHORT)
    assert (shown.stdout, shown.stderr) == (wanted[0].text + "\n", "")


def test_run_keeps_the_conversation_between_lines(bundle: Path) -> None:
    lines = "Where is the ark?\n\nWhose house?\n"
    done = planforge("run", bundle, "--chat", *SHORT, "--json", stdin=lines)
    assert done.returncode == 0, done.stderr
    first, blank, second = (json.loads(line) for line in done.stdout.splitlines())
    assert blank is None
    assert first["prompt_tokens_reused"] == 0 < second["prompt_tokens_reused"]
    said = [MESSAGES[1], {"role": "assistant", "content": first["text"]}, MESSAGES[3]]
    with TextGenerator.load(bundle) as model:
        assert second["token_ids"] == list(model.chat(said, max_new_tokens=12).token_ids)
        assert second["token_ids"] != list(model.chat(MESSAGES[3:], max_new_tokens=12).token_ids)
    shown = planforge("run", bundle, "--chat", *SHORT, stdin=lines)
    assert shown.stdout == f"{first['text']}\n\n{second['text']}\n"


def test_run_goes_on_with_what_an_answer_begins_with(bundle: Path) -> None:
    done = planforge("run", bundle, "Where is the ark?", "--chat", *SHORT, "--continue", " It is")
    assert done.returncode == 0, done.stderr
    said = [MESSAGES[1], {"role": "assistant", "content": " It is"}]
    with TextGenerator.load(bundle) as model:
        answer = model.chat(said, max_new_tokens=12, continue_final_message=True)
    assert done.stdout == f" It is{answer.text}\n"


def test_run_says_what_goes_with_chat(own: Path, tmp_path: Path) -> None:
    assert "--system needs --chat" in error_line("run", own, "hi", "--system", "x")
    assert "--continue needs --chat" in error_line("run", own, "hi", "--continue", "x")
    variable = ("--template-option", "thinking=false")
    assert "--template-option needs --chat" in error_line("run", own, "hi", *variable)
    line = error_line("run", own, "--chat", "hi", *variable)
    assert (
        "--template-option: the chat template does not use 'thinking'; it uses none; leave"
        " --template-option out" in line
    )
    wrong = ("--template-option", "thinking")
    assert "'thinking' must be NAME=VALUE" in error_line("run", own, "--chat", "hi", *wrong)
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text('{"text": "a", "pair": "b"}\n', encoding="utf-8")
    assert "--chat takes messages, not pairs" in error_line("run", own, "--chat", "--input", pairs, code=1)
    manifest = json.loads((own / "manifest.json").read_text(encoding="utf-8"))
    del manifest["tokenizer"]["chat_template"]
    edit_json(own / "manifest.json", **manifest)
    assert "has no chat template; use generate() (without --chat)" in error_line("run", own, "hi", "--chat")
