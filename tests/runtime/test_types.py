"""A user's program is checked against the installed wheel: right uses pass, each wrong one is refused."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import numpy as np
import pytest

from ..helpers.paths import ROOT

RIGHT = """\
'''A program of a user, as it should be written.'''

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from planforge.runtime import (
    Answers,
    AsyncTextEncoder,
    AsyncTextGenerator,
    AsyncTranslator,
    Chunk,
    Classification,
    ContextLengthError,
    Embedding,
    Generation,
    InputError,
    PlanForgeError,
    Ranked,
    TextEncoder,
    TextGenerator,
    Translation,
    Translator,
    load,
)


def generate(folder: str) -> list[str]:
    with TextGenerator.load(folder, precision="int8", threads=2) as model:
        for chunk in model.stream("And it came to pass", max_new_tokens=60, temperature=0.8, seed=1):
            print(chunk, end="", flush=True)
            reason: str | None = chunk.finish_reason
            print(reason, chunk.usage.prompt_tokens, chunk.logprobs)
        one: Generation = model.generate("In the beginning", top_k=40, stop=["\\n", "."])
        ids: Generation = model.generate([464, 717], temperature=0)
        many: list[Generation] = model.generate(["a", "b", "c"], batch_size=2, logprobs=False, progress=True)
        each: Iterator[Generation] = model.iterate(["a", "b", "c"], max_new_tokens=8, progress=print)
        reply = model.chat([{"role": "user", "content": "Hello"}], generation="checkpoint")
        stream = model.stream_chat([{"role": "user", "content": "Hello"}])
        stream.cancel()
        last: list[Chunk] = list(stream)
        print(model.score("a text").perplexity, len(last), one.usage.total_tokens, repr(model))
        return [answer.text for answer in (one, ids, *many, *each, reply)]


def encode(folder: str, texts: list[str]) -> npt.NDArray[np.float32]:
    encoder = TextEncoder.load(folder, backend="ort-cpu")
    one: Classification = encoder.classify("a text", pair="another", truncation=None)
    pairs: list[Classification] = encoder.classify([("a", "b"), "c"], batch_size=8)
    best: list[Ranked] = encoder.rank("what", texts, top_k=3)
    answers: Answers = encoder.answer("who?", "a long context", n_best=2)
    vectors: Iterator[Embedding] = encoder.iterate("embed", iter(texts), prompt_name="query")
    print(one.label, pairs[0].score, best[0].index, answers.best, next(vectors).vector.shape)
    filled = encoder.fill_mask(["[MASK]"], top_k=1)
    print(encoder.tag("Paris").entities, [text.masks[0][0].token for text in filled])
    return encoder.embed(texts, truncation="tail", truncate_dim=128, normalize=True, progress=True)


def translate(folder: str, texts: list[str]) -> None:
    with Translator.load(folder) as translator:
        first: Translation = translator.translate("the 3rd of May", num_beams=4, n_best=2)
        rest: list[Translation] = translator.translate(texts, batch_size=16, early_stopping="never")
        done = [result.candidates[0].score for result in translator.iterate(texts, truncation="head")]
        print(first.text, rest[0].dropped, done, "".join(str(chunk) for chunk in translator.stream("May")))


async def serve(folder: str) -> npt.NDArray[np.float32]:
    async with await AsyncTextGenerator.load(folder, threads=2) as model:
        async for chunk in model.stream("Hello", max_new_tokens=8):
            print(chunk, chunk.finish_reason)
        answer: Generation = await model.generate("Hello", seed=1)
        print(answer.text, (await model.chat([{"role": "user", "content": "Hello"}])).text)
    async with await AsyncTranslator.load(folder) as translator:
        first: Translation = await translator.translate("May", num_beams=4)
        rest: list[Translation] = await translator.translate(["May", "June"])
        print(first.text, rest[0].text, translator.model.submit(["May"], client="me").result()[0].text)
    encoder = AsyncTextEncoder(TextEncoder.load(folder), client="me")
    one: Classification = await encoder.classify("a text", pair="another")
    future = encoder.model.submit("rank", [("what", "text")], timeout=5.0, truncation="head")
    print(one.label, future.result()[0].score, (await encoder.answer("who?", "context", n_best=2)).best)
    return await encoder.embed(["a"], normalize=True)


def main(folder: str) -> None:
    try:
        model = load(folder, memory_limit=2_000_000_000)
        if isinstance(model, TextGenerator):
            print(model.generate("Hello").text)
        elif isinstance(model, TextEncoder):
            print(model.features("Hello", layers="last").vectors.shape)
        else:
            print(model.translate("Hello").text)
    except ContextLengthError as error:
        print(error.tokens, error.limit)
    except (InputError, PlanForgeError) as error:
        print(error)
"""
# Each line that ends so is a mistake, and no other.
MARK = "  # wrong"
WRONG = """\
'''A program of a user with a mistake in each line that says so.'''

from __future__ import annotations

from planforge.runtime import (
    AsyncTextEncoder,
    AsyncTextGenerator,
    AsyncTranslator,
    Generation,
    TextEncoder,
    TextGenerator,
    Translator,
    load,
)
from planforge.runtime import Generator as Missing  # wrong

generator = TextGenerator.load("x")
encoder = TextEncoder.load("x")
translator = Translator.load("x")

load("x").genrate("hi")  # wrong
load("x").generate("hi")  # wrong
load("x", backnd="ort-cpu")  # wrong
load("x", "ort-cpu")  # wrong
TextGenerator.load("x", thread=2)  # wrong
only: TextGenerator = load("x")  # wrong
other: TextEncoder = TextGenerator.load("x")  # wrong

generator.genrate("hi")  # wrong
generator.generate("hi", temprature=0.8)  # wrong
generator.generate("hi", max_tokens=5)  # wrong
generator.generate("hi", 5)  # wrong
generator.generate("hi", truncate="left")  # wrong
generator.generate("hi", truncation="left")  # wrong
generator.generate("hi", seed="one")  # wrong
generator.generate(None)  # wrong
generator.chat("hi")  # wrong
single: Generation = generator.generate(["a", "b"])  # wrong
generator.generate(["a", "b"]).text  # wrong
generator.generate("a")[0]  # wrong
for chunk in generator.stream("hi"):
    print("" + chunk)  # wrong
    chunk.txt  # wrong
    print(chunk.upper())  # wrong
"".join(generator.stream("hi"))  # wrong
generator.stream("hi", on_token=lambda: True)  # wrong

encoder.embed(["a"], truncate="left")  # wrong
encoder.embed(["a"], truncation="left")  # wrong
encoder.embed(["a"], "mean")  # wrong
encoder.embed(["a"], pooling="sum")  # wrong
encoder.embed(None)  # wrong
encoder.embed([b"a"])  # wrong
encoder.embed(["a"], progress=3)  # wrong
encoder.classify("a", top_k=3)  # wrong
encoder.classify(["a", "b"]).label  # wrong
encoder.rank("a", ["b"], 3)  # wrong
encoder.next_sentence("a")  # wrong
encoder.answer("who?")  # wrong
encoder.stream("embed", ["a"])  # wrong
encoder.iterate("embedd", ["a"])  # wrong
encoder.iterate("tag", ["a"], layers="last")  # wrong
next(encoder.iterate("embed", ["a"])).label  # wrong

encoder.submit("embedd", ["a"])  # wrong
encoder.submit("tag", ["a"], layers="last")  # wrong
encoder.submit("embed", ["a"], priority=1)  # wrong
encoder.submit("embed", ["a"]).result()[0].label  # wrong

translator.submit(["a"], beams=4)  # wrong
translator.submit(["a"]).text  # wrong
translator.translate("a", beams=4)  # wrong
translator.translate("a", truncation="windows")  # wrong
translator.translate(["a"]).text  # wrong
translator.translations(["a"])  # wrong
translator.stream("a", batch_size=4)  # wrong
"".join(translator.stream("a"))  # wrong


async def serve(model: AsyncTextGenerator, encoder: AsyncTextEncoder, translator: AsyncTranslator) -> None:
    await model.generate("hi", temprature=0.8)  # wrong
    await model.generate(["a", "b"], batch_size=2)  # wrong
    model.generate("hi").text  # wrong
    for chunk in model.stream("hi"):  # wrong
        print("")
    (await encoder.classify(["a", "b"])).label  # wrong
    await encoder.embed(["a"], pooling="sum")  # wrong
    (await translator.translate(["a"])).text  # wrong
    other: AsyncTextEncoder = await AsyncTextGenerator.load("x")  # wrong
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the built wheel and numpy, a folder beside the checkout's reach."""
    folder = tmp_path_factory.mktemp("user")
    source = folder / "source"
    for package in ("exporter", "models", "runtime"):
        ignored = shutil.ignore_patterns("*.safetensors", "__pycache__")
        shutil.copytree(ROOT / package, source / package, ignore=ignored)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = "import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))"
    run([sys.executable, "-c", build, str(folder)], source, check=True)
    venv.create(folder / "venv")
    (packages,) = folder.glob("venv/[Ll]ib/**/site-packages")
    (wheel,) = folder.glob("planforge-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(packages)
    shutil.rmtree(source)
    # What the wheel needs. Of this folder's own .pth files, one of which leads to the checkout, none is read.
    (packages / "needs.pth").write_text(str(Path(np.__file__).parent.parent), encoding="utf-8")
    (folder / "right.py").write_text(RIGHT, encoding="utf-8")
    (folder / "wrong.py").write_text(WRONG, encoding="utf-8")
    return folder


def run(command: list[str], folder: Path, check: bool = False) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MYPYPATH")}
    return subprocess.run(
        command, cwd=folder, env=kept, check=check, capture_output=True, text=True, encoding="utf-8"
    )


def python_of(environment: Path) -> Path:
    return next(path for path in environment.glob("venv/*/python*") if path.stem == "python")


def marked_lines() -> set[int]:
    return {number for number, line in enumerate(WRONG.splitlines(), 1) if line.endswith(MARK)}


def test_the_programs_are_about_as_long_as_they_should_be() -> None:
    assert 75 <= len([line for line in RIGHT.splitlines() if line.strip()]) <= 110
    assert len(marked_lines()) > 40


def test_the_wheel_runs_without_typing_extensions(environment: Path) -> None:
    code = (
        "import sys; sys.modules['typing_extensions'] = None\n"
        "import planforge.runtime as runtime\n"
        "print(runtime.__file__, *[type(getattr(runtime, name)).__name__ for name in runtime.__all__])"
    )
    done = run([str(python_of(environment)), "-c", code], environment)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.split()[0]).is_relative_to(environment)


def test_mypy_passes_right_uses_and_refuses_each_wrong_one(environment: Path) -> None:
    options = ["--strict", "--no-error-summary", "--config-file=", "--cache-dir", str(environment / "cache")]
    python = ["--python-executable", str(python_of(environment))]
    done = run([sys.executable, "-m", "mypy", *options, *python, "right.py", "wrong.py"], environment)
    assert not done.stderr
    errors = re.findall(r"^(\S+):(\d+): error: ", done.stdout, re.MULTILINE)
    assert {file for file, _ in errors} == {"wrong.py"}, done.stdout
    assert {int(line) for _, line in errors} == marked_lines(), done.stdout


def test_pyright_passes_right_uses_and_refuses_each_wrong_one(environment: Path) -> None:
    """Basedpyright is pyright with its own node; its further rules are off in these two modes."""
    settings = {"typeCheckingMode": "standard", "strict": ["right.py"], "include": ["right.py", "wrong.py"]}
    (environment / "pyrightconfig.json").write_text(json.dumps(settings), encoding="utf-8")
    program = shutil.which("basedpyright", path=str(Path(sys.executable).parent))
    assert program is not None
    done = run([program, "--outputjson", "--pythonpath", str(python_of(environment))], environment)
    found = json.loads(done.stdout)
    assert found["summary"]["filesAnalyzed"] == 2
    errors = [(Path(e["file"]).name, e["range"]["start"]["line"] + 1) for e in found["generalDiagnostics"]]
    assert {file for file, _ in errors} == {"wrong.py"}, done.stdout
    assert {line for _, line in errors} == marked_lines(), done.stdout
