"""Every Python example of the README and of docs/ runs as it stands there, and its commands are real."""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import PIL.Image
import pytest

from planforge.exporter import export, package
from planforge.exporter.checkpoints.checkpoint import Checkpoint
from planforge.exporter.checkpoints.source import DEMOS, Source
from planforge.exporter.exporting import import_folder
from planforge.runtime import TextEncoder, TextGenerator, Translator

from ..helpers.cli import planforge
from ..helpers.models import edit_json
from ..helpers.optimums import OPTIMUM_PYTHON
from ..helpers.paths import ROOT

PAGES = {str(page.relative_to(ROOT)): page for page in (ROOT / "README.md", *ROOT.glob("docs/**/*.md"))}
TEXTS = {name: page.read_text(encoding="utf-8") for name, page in PAGES.items()}
EXAMPLES = {name: re.findall(r"```python\n(.*?)```", text, re.DOTALL) for name, text in TEXTS.items()}
ELSEWHERE = ("docs/sources.md", "docs/train.md")  # whose examples test_sources.py and test_train.py run
WITH_EXAMPLES = [name for name, examples in EXAMPLES.items() if examples and name not in ELSEWHERE]
# The pages' names of bundles, and the tiny ones that stand for them.
BUNDLES = {
    "sentiment": "classifier",
    "cross-encoder": "ranker",
    "chooser": "chooser",
    "bert": "pretrained",
    "tagger": "tagger",
    "reader": "reader",
    "reranker": "ranker",
}
RETRIEVAL = ("bge-m3", "colbert", "splade", "static")
# What an example prints somewhere.
PRINTED = {
    "embed(": r"0\.\d+\n\(384,\) 0",
    "layers=": r"zurich 0 6 \(1536,\)",
    "classify(": r"LABEL_\d 0\.\d+ \{'LABEL_0'",
    "candidate_labels=": r"(sports|politics|cooking) \{'sports': 0\.\d+, 'politics'",
    "rank(": r"[01] 0\.\d+ (Wings|Bread)",
    "next_sentence(": r"^0\.\d+",
    "fill_mask(": r"(\S+ 0\.\d+\n){3}",
    "tag(": r"LABEL_\d .* \d+ \d+ 0\.\d+\n",
    "answer(": r"\d+ \d+ 0\.\d+\n.*Answer\(|None",
    "truncation=": r"\(384,\)\n1746",
    "translate(": r"1998-05-03\n(1998-05-03 \S+\n){3}\[\('2007-09-03', .*\n2012-12-21\n\('1',.*\n\(11, 12\)",
    "export(": r"^\['decoder.ort.fp32', 'decoder.ort.int8'\]",
    "verify(": r"^True$",
    "package(": r"^onnxruntime-genai \d+\.\d+\.\d+ True$",
    "json_schema=": r".+ \d+\n(yes|no)\n\d{3,4}\n$",
    "num_beams=": r"^-\d+\.\d+ \[",
    "reuse_prompt=": r"(?s)^0 .*\n[1-9]\d* \d+ \d+ ",
    "answer.neighbours": r"\n0\.\d+ \w+\.txt from token \d+: ",
    ".stream(": r"(length|stop|eos) \d+",
    "seed=7": r"^\(32, 32, 3\) 7$",
    "analogy(": r"^\(2, 32\)\n\['king', .*\]\nqueen\n$",
    "on_step=": r"step 10 of 2\d, \d+ s left\nstep 11",
    "model.search(": r"^0\.\d+ Make thee an ark of gopher wood\.\n0\.\d+ ",
    "similarity(queries": r"^\(1, 3\) 0$",
    "embed_sparse(": r"^\{.*\w+': \d+\.\d+",
    "embed_multi(": r"^\(\d+, 16\) \(\d+, 16\) -?\d+\.\d+$",
    "embed_hybrid(": r"^all three: -?\d+\.\d+$",
    "write_store(": r"^\[\(0, 0\.\d+\), \([12], 0\.\d+\)\]$",
    "finder.search(": r"^minilm\n(  0\.\d+ Ge\d.*\n)+static\n(.*\n)+reranker\n  -?\d",
    "IndexFlatIP(": r"^Make .*\. \[0\.\d+ 0\.\d+\]\nMake .*\. \[\d+ \d+\]$",
    "embed_images(": r"^\(1, \d+\) \{'cat': 0\.\d+, 'dog': 0\.\d+\}",
}
# Some verses for the page that searches a book of them.
VERSES = """Ge6:14 Make thee an ark of gopher wood; rooms shalt thou make in the ark.
Ge7:9 There went in two and two unto Noah into the ark, the male and the female, as God had commanded Noah.
Ge1:3 And God said, Let there be light: and there was light.
Ge8:11 And the dove came in to him in the evening.
"""
TASKS = ("embed", "features", "classify", "rank", "next_sentence", "fill_mask", "tag", "answer")
METHODS = (
    "embed_sparse",
    "embed_multi",
    "embed_hybrid",
    "search",
    "generate",
    "stream",
    "chat",
    "translate",
    "iterate",
    "align",
)


@pytest.fixture(scope="module")
def folder(
    tmp_path_factory: pytest.TempPathFactory,
    demo_bundle: Path,
    minilm_bundle: Path,
    head_bundle: Callable[[str], Path],
    dates_bundle: Path,
    llama_demo_bundle: Path,
    picture_bundle: Path,
    clip_bundle: Path,
    words_bundle: Path,
    exported: Path,
    retrieval_bundle: Callable[[str], Path],
) -> Path:
    """A folder as the pages have it: build/minilm, build/transformer-demo, build/t5, one for each head."""
    folder = tmp_path_factory.mktemp("pages")
    shutil.copy(ROOT / "README.md", folder)
    build = folder / "build"
    build.mkdir()
    (build / "gpt2-demo").symlink_to(demo_bundle)
    (build / "bert-demo").symlink_to(minilm_bundle)
    (build / "minilm").symlink_to(minilm_bundle)
    (build / "transformer-demo").symlink_to(dates_bundle)
    (build / "llama-demo").symlink_to(llama_demo_bundle)
    (build / "sd").symlink_to(picture_bundle)
    (build / "clip").symlink_to(clip_bundle)
    (build / "words").symlink_to(words_bundle)
    export("retro-demo", build / "retro-demo", target=["cpu"], precision=["fp32"], verify=False)
    index = ("-o", build / "bible-index", "--for", build / "retro-demo")
    assert planforge("index", DEMOS / "retro-demo/texts", *index).returncode == 0
    PIL.Image.new("RGB", (90, 60), "orange").save(folder / "photo.jpg")
    graphs = shutil.copytree(exported / "t5.onnx", folder / "t5")
    import_folder(graphs, build / "t5", precision="fp32", target="cpu", verify=False)
    for name, tiny in BUNDLES.items():
        (build / name).symlink_to(head_bundle(tiny))
    for kind in RETRIEVAL:
        (build / kind).symlink_to(retrieval_bundle(kind))
    (build / "genesis.txt").write_text(VERSES)
    shutil.copytree(head_bundle("classifier"), build / "nli")
    encoder = json.loads((build / "nli/manifest.json").read_text(encoding="utf-8"))["encoder"]
    edit_json(build / "nli/manifest.json", encoder=encoder | {"labels": ["no", "neutral", "entailment"]})
    return folder


@pytest.fixture(scope="module")
def printed(folder: Path) -> Iterator[dict[str, str]]:
    """What each example prints; later ones of a page use what earlier ones loaded."""
    outputs = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for page in WITH_EXAMPLES:
            names: dict[str, Any] = {}
            for example in EXAMPLES[page]:
                with redirect_stdout(StringIO()) as out:
                    exec(compile(example, page, "exec"), names)
                outputs[example] = out.getvalue()
            for value in names.values():
                if isinstance(value, (TextGenerator, TextEncoder, Translator)):
                    value.close()
    yield outputs


@pytest.mark.parametrize("call", PRINTED)
def test_an_example_prints_what_it_says(printed: dict[str, str], call: str) -> None:
    outputs = [output for example, output in printed.items() if call in example]
    assert outputs, f"no example has {call}"
    assert any(re.search(PRINTED[call], output) for output in outputs), outputs


def test_every_task_has_an_example() -> None:
    examples = [example for page in WITH_EXAMPLES for example in EXAMPLES[page]]
    for task in (*TASKS, *METHODS):
        assert any(f".{task}(" in example for example in examples), task


def test_the_example_of_optimum_runs_in_its_environment(folder: Path) -> None:
    """With a padded batch, whose texts are those of PlanForge's runtime for each prompt alone."""
    if not OPTIMUM_PYTHON.exists():
        pytest.skip("needs make build/optimum-venv/.ready")
    (example,) = re.findall(r"```py\n(.*?)```", TEXTS["docs/interop.md"], re.DOTALL)
    bundle = folder / "build/llama-demo"
    package(bundle, folder / "build/llama-optimum", runtime="optimum", verify=False)
    done = subprocess.run([OPTIMUM_PYTHON, "-c", example], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    prompts = ["And it came to pass", "In the"]
    with TextGenerator.load(bundle) as model:
        wanted = [prompt + model.generate(prompt, max_new_tokens=20).text for prompt in prompts]
    assert ast.literal_eval(done.stdout) == wanted


def test_examples_that_need_other_environments_compile() -> None:
    examples = {name: re.findall(r"```py\n(.*?)```", text, re.DOTALL) for name, text in TEXTS.items()}
    assert len(examples["docs/interop.md"]) == 1 and len(examples["docs/retrieval.md"]) == 2
    for name, found in examples.items():
        for example in found:
            compile(example, name, "exec")


@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_page_are_real(page: str) -> None:
    for name in sorted(set(re.findall(r"^    planforge ([a-z][a-z-]*)", TEXTS[page], re.MULTILINE))):
        done = planforge(name, "--help")
        assert done.returncode == 0, name
        lines = re.findall(rf"^    planforge {name} [^#\n]*", TEXTS[page], re.MULTILINE)
        for option in sorted({option for line in lines for option in re.findall(r"--[a-z][a-z0-9-]*", line)}):
            assert option in done.stdout, f"{name} {option}"


@pytest.mark.parametrize("page", PAGES)
def test_links_of_a_page_lead_to_files(page: str) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)", TEXTS[page]):
        if not target.startswith(("http:", "https:")):
            assert (PAGES[page].parent / target).exists(), target


def test_the_readme_is_read_in_five_minutes() -> None:
    assert len(TEXTS["README.md"].splitlines()) <= 150


def test_the_transformer_of_ones_own_can_be_exported(printed: dict[str, str], folder: Path) -> None:
    assert printed
    checkpoint = Checkpoint(Source("folder", "own", folder / "build" / "own"))
    defaults = checkpoint.generation
    assert defaults is not None
    assert (defaults.decoder_start, defaults.source_eos, defaults.max_new_tokens) == (0, 1, 31)
    assert checkpoint.tokenizers[0].encode("good morning") == [3, 4]
