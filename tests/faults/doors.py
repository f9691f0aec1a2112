"""What is damaged, and the ways by which a damaged file gets in: each kind of file with its doors."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import shutil
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from .mutations import Mutator
from .templates import make_template

Door = Callable[[Path], object]
DECODER, ENCODER, TRANSLATOR = "decoder", "encoder", "translator"  # folders of the material
PLAIN = "plain"  # an encoder without classes, which fit-head gives it
ALL = (DECODER, ENCODER, TRANSLATOR)


class TracingReachedError(Exception):
    """An export has read all of a checkpoint: what comes after works on graphs of our own."""


@dataclass(frozen=True)
class Kind:
    """One kind of file: where there is one, how it is damaged, and through which doors it then goes."""

    name: str
    part: str  # "bundle", "checkpoint" or "import"
    patterns: Sequence[str]  # of its files in that folder
    change: Callable[[Mutator, bytes], bytes]
    doors: Sequence[Door]
    subjects: Sequence[str] = ALL
    slow: bool = False  # takes so long that a run has a tenth as many of its cases


def use(model: Any) -> None:
    """Let a loaded model answer, as its task is."""
    name = type(model).__name__
    if name == "TextGenerator":
        model.generate("And it came", max_new_tokens=3)
        model.generate(["a", "b c"], max_new_tokens=2, num_beams=2)
        model.score("In the beginning")
        if model.has_chat:
            model.chat([{"role": "user", "content": "Hello"}], max_new_tokens=2)
    elif name == "TextEncoder":
        model.embed(["hello", "a plan is it"])
        if "sequence_classification" in model.heads:
            model.classify("hello")
    else:
        model.translate("May 3, 1998", max_new_tokens=3)


def load_and_use(folder: Path) -> None:
    from planforge.runtime import load

    with load(folder, backend="ort-cpu", threads=1, prepared=False) as model:
        use(model)


def load_any_backend(folder: Path) -> None:
    from planforge.runtime import load

    with load(folder, threads=1, prepared=False) as model:
        str(model)


def test_itself(folder: Path) -> None:
    from planforge.runtime.apps.check.selftest import selftest

    selftest(folder, backend="ort-cpu")


def compare_golden_texts(folder: Path) -> None:
    from planforge.runtime.apps.check.texts import compare_texts
    from planforge.runtime.bundle.bundle import Bundle

    compare_texts(Bundle.open(folder))


def read_plans(folder: Path) -> None:
    """Look for the name of the graph in each plan, as verify does."""
    from planforge.exporter.tensorrt.build import check_plan_names
    from planforge.runtime.bundle.bundle import Bundle

    check_plan_names(Bundle.open(folder))


def verify_golden(folder: Path) -> None:
    from planforge.exporter import verify

    verify(folder)


def inspect(folder: Path) -> None:
    """Inspect a bundle, and each of its graphs and plans, as the command shows them."""
    from planforge.exporter.commands.inspection import inspect
    from planforge.runtime.apps.commands.console import PlainConsole, format_json

    files = [*folder.glob("plans/*.plan"), *folder.glob("*.onnx")] or [folder]
    for path in files:
        found = inspect(path)
        shown = io.StringIO()
        PlainConsole(width=160, file=shown).print(*found.tables())
        check_printable(shown.getvalue())
        format_json(found.to_json()).encode()


def check_printable(text: str) -> None:
    """Refuse what a terminal would obey, or show in another order."""
    hidden = [sign for sign in text if sign != "\n" and unicodedata.category(sign) in ("Cc", "Cs", "Cf")]
    assert not hidden, f"{hidden[0]!r} goes to the terminal"


def lint(folder: Path) -> None:
    from planforge.exporter.linting.lint import lint
    from planforge.runtime.apps.commands.console import format_json

    path = next(folder.glob("*.onnx"), folder)
    format_json(lint(path).to_json()).encode()


def export(folder: Path) -> None:
    """Export a checkpoint up to the tracing, which reads nothing but our own models' code."""
    from planforge.exporter import export

    def stop(*arguments: Any) -> None:
        raise TracingReachedError

    exporting: Any = import_module("planforge.exporter.exporting")
    exporting.start_trace = lambda *arguments: contextlib.nullcontext({})
    exporting.finish_trace = stop
    with contextlib.suppress(TracingReachedError):
        export(folder, folder.with_name("out"), target=["cpu"], verify=False, exporter="planforge")


def import_graphs(folder: Path) -> None:
    from planforge.exporter.exporting import import_folder

    import_folder(folder, folder.with_name("out"), precision=["fp32"], target=["portable"], verify=False)


@cache
def open_kept(material: Path, name: str) -> Any:
    """Return a sound model, loaded once in a process."""
    from planforge.runtime import load

    return load(material / name / "bundle", backend="ort-cpu", threads=1, prepared=False)


def read_text(folder: Path) -> str:
    """Return the text, with half surrogate pairs, as a program may pass it."""
    content = (folder / "prompt.txt").read_bytes()
    try:
        return content.decode("utf-8", errors="surrogatepass")
    except UnicodeDecodeError:
        return content.decode("latin-1")


def answer_prompt(folder: Path) -> None:
    """Give a text to every task of sound models; the template is one that words contents as they are."""
    text = read_text(folder)
    material = Path(os.environ["PLANFORGE_FAULTS_MATERIAL"])
    generator = open_kept(material, DECODER)
    generator.generate(text, max_new_tokens=2, truncation="tail")
    generator.generate(text, max_new_tokens=2, stop=[text[:20] or "a"], parse_special=True, truncation="tail")
    generator.count_tokens(text)


def embed_prompt(folder: Path) -> None:
    text = read_text(folder)
    material = Path(os.environ["PLANFORGE_FAULTS_MATERIAL"])
    open_kept(material, ENCODER).embed([text, "a"], truncation="head")


def translate_prompt(folder: Path) -> None:
    text = read_text(folder)
    material = Path(os.environ["PLANFORGE_FAULTS_MATERIAL"])
    open_kept(material, TRANSLATOR).translate(text, max_new_tokens=2, truncation="head")


def read_prompts(folder: Path) -> None:
    from planforge.exporter.calibration.prompts import read_prompts

    read_prompts(folder / "prompt.txt", folder)


def read_labelled(folder: Path) -> None:
    from planforge.exporter.fitting.labelled_texts import read_table

    (folder / "prompt.txt").rename(folder / "prompt.tsv")
    read_table(folder / "prompt.tsv")


def render(folder: Path) -> None:
    """Word conversations by a template, as a chat with the bundle does."""
    from planforge.runtime.bundle.bundle import Bundle
    from planforge.runtime.text.chat import Chat
    from planforge.runtime.text.tokenizer import Tokenizer

    bundle = Bundle.open(folder)
    chat = Chat.of(bundle)
    if chat is None:
        return
    tokenizer = Tokenizer.from_file(bundle.path(bundle.manifest.tokenizer["files"][0]))
    messages: list[dict[str, object]] = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": [{"type": "text", "text": "Hello <s> there"}]},
        {
            "role": "assistant",
            "content": "Yes",
            "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}],
        },
        {"role": "user", "content": "a" * 500},
    ]
    chat.encode(messages, tokenizer)


TEMPLATE_CHANGES = 3  # of four are templates of our own making, which parse more often


def change_template(mutator: Mutator, data: bytes) -> bytes:
    if mutator.random.randrange(4) < TEMPLATE_CHANGES:
        return make_template(mutator.random).encode("utf-8", errors="surrogatepass")
    return mutator.change_bytes(data)


def make_prompt(mutator: Mutator, data: bytes) -> bytes:
    """Make a text of odd characters, special tokens and repetitions; now and then bytes that are none."""
    random = mutator.random
    if random.randrange(8) == 0:
        return mutator.change_bytes(data)
    pieces = []
    for _ in range(random.choice((0, 1, 3, 20))):
        ranges = ((0, 0x80), (0x80, 0x800), (0x800, 0xFFFF), (0x1F000, 0x1FAFF), (0xD800, 0xE000))
        piece = "".join(chr(random.randrange(*random.choice(ranges))) for _ in range(random.randrange(1, 9)))
        pieces.append(random.choice((piece, *PROMPT_PIECES)))
    return (random.choice(("", " ", "\n")).join(pieces) * random.choice((1, 1, 1, 50))).encode(
        "utf-8", errors="surrogatepass"
    )


PROMPT_PIECES = (
    "<|endoftext|>",
    "[CLS]",
    "</s>",
    "\u0301" * 300,
    "\u202e",
    "\0",
    "\ufeff",
    "\r\n",
    "a" * 3000,
    " " * 3000,
    "👨‍👩‍👧‍👦",
    "ﷺ" * 40,
    "한국어",
    "\U000f0000",
)

GOLDEN = ("checks/golden-*.npz",)
ONNX = Mutator.change_onnx
JSON = Mutator.change_json
KINDS = {
    kind.name: kind
    for kind in (
        Kind("manifest", "bundle", ("manifest.json",), JSON, (load_and_use, load_any_backend, inspect, lint)),
        Kind("golden", "bundle", GOLDEN, Mutator.change_npz, (test_itself,)),
        Kind("golden-of-verify", "bundle", GOLDEN, Mutator.change_npz, (verify_golden,), slow=True),
        Kind("golden-texts", "bundle", ("checks/texts-*.json",), JSON, (compare_golden_texts,)),
        Kind(
            "plan",
            "bundle",
            ("plans/*.plan",),
            Mutator.change_head,
            (inspect, load_any_backend, read_plans),
            subjects=(DECODER,),
        ),
        Kind("bundle-tokenizer", "bundle", ("tokenizer/tokenizer*.json",), JSON, (load_and_use,)),
        Kind(
            "chat-template",
            "bundle",
            ("tokenizer/chat_template-*.jinja",),
            change_template,
            (render,),
            (DECODER,),
        ),
        Kind("bundle-onnx", "bundle", ("onnx/*.onnx",), ONNX, (load_and_use, lint)),
        Kind("safetensors", "checkpoint", ("model.safetensors",), Mutator.change_safetensors, (export,)),
        Kind("tokenizer", "checkpoint", ("tokenizer.json", "vocab.json", "vocab.txt"), JSON, (export,)),
        Kind("config", "checkpoint", ("config.json", "*_config.json", "*_map.json"), JSON, (export,)),
        Kind("onnx", "import", ("model.onnx",), ONNX, (lint, inspect, import_graphs)),
        Kind("import-config", "import", ("*.json",), JSON, (import_graphs,)),
        Kind(
            "prompt",
            "prompt",
            ("prompt.txt",),
            make_prompt,
            (answer_prompt, embed_prompt, translate_prompt, read_prompts, read_labelled),
            (DECODER,),
        ),
    )
}


def damage(kind: Kind, number: int, seed: int, material: Path, case: Path) -> tuple[Path, Door, str]:
    """Write the damaged copy number so and so of a kind; return its folder, its door, and what it is."""
    mutator = Mutator(hash_seed(seed, kind.name, number))
    found = {name: find_files(kind, material / name / kind.part) for name in kind.subjects}
    subject = mutator.random.choice([name for name, files in found.items() if files])
    folder = case / "subject"
    source = material / subject / kind.part
    if kind.part == "import" or kind.slow:  # which refuse hard links
        shutil.copytree(source, folder)
    else:
        copy_linked(source, folder)
    path = folder / mutator.random.choice(found[subject])
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(kind.change(mutator, content))
    if kind.part == "bundle" and path.name != "manifest.json":
        list_anew(folder, path)
    door = mutator.random.choice(list(kind.doors))
    return folder, door, f"{kind.name} {number}: {subject}, {path.name}, {door.__name__}"


def find_files(kind: Kind, source: Path) -> list[Path]:
    """Return the files of one kind in a folder, below it."""
    return sorted(path.relative_to(source) for pattern in kind.patterns for path in source.glob(pattern))


def hash_seed(*words: object) -> int:
    return int.from_bytes(hashlib.sha256(repr(words).encode()).digest()[:8], "big")


def copy_linked(source: Path, target: Path) -> None:
    """Copy a folder; its files are hard links, of which none is ever written to."""
    for path in sorted(source.rglob("*")):
        place = target / path.relative_to(source)
        if path.is_dir():
            place.mkdir(parents=True, exist_ok=True)
        else:
            place.parent.mkdir(parents=True, exist_ok=True)
            link_or_copy(path.resolve(), place)


def link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copy(source, target)


def list_anew(folder: Path, path: Path) -> None:
    """Put a changed file's hash and size into the manifest, as whoever changes it on purpose does."""
    manifest = folder / "manifest.json"
    value = json.loads(manifest.read_text())
    content = path.read_bytes()
    name = path.relative_to(folder).as_posix()
    value["files"][name] = {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
    manifest.unlink()
    manifest.write_text(json.dumps(value))
