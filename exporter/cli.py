"""The `planforge` command: parse, call one function, print. Results on stdout, everything else on stderr."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from ..runtime.errors import InputError, PlanForgeError

app = typer.Typer(
    help="Takes a transformer from PyTorch to the edge: export, build, verify, run.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
errors = Console(stderr=True, highlight=False, soft_wrap=True)
EXPORT_EXTRA = ("huggingface_hub", "onnx", "onnx_ir", "onnxscript", "safetensors", "torch")
FILE_WIDTH = 160  # columns of a table that goes into a file or a pipe

SM_HELP = (
    "GPU architectures: sm75 (RTX 20), sm80 (A100), sm86 (RTX 30), sm89 (RTX 40), sm120 (RTX 50), sm121."
)
BundleArgument = Annotated[Path, typer.Argument(help="The folder that export wrote.", show_default=False)]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]


class Settings:
    """What the options before the command say."""

    debug = False


def print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"planforge {version('planforge')}")
        raise typer.Exit


@app.callback()
def before_every_command(
    debug: Annotated[bool, typer.Option(help="Show tracebacks and debug messages.")] = False,
    show_version: Annotated[
        bool,
        typer.Option("--version", callback=print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    Settings.debug = debug
    del show_version
    logging.basicConfig(level=logging.DEBUG if debug else logging.WARNING, format="%(message)s")
    level = logging.DEBUG if debug else logging.INFO if errors.is_terminal else logging.WARNING
    logging.getLogger("planforge").setLevel(level)


@app.command()
def export(
    model: Annotated[str, typer.Argument(help="A demo, a folder in Hugging Face's layout, or a hub id.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The bundle's folder.", show_default=False)],
    precision: Annotated[str, typer.Option(help="fp32, fp16; the first is what run takes.")] = "fp32,fp16",
    target: Annotated[
        str | None,
        typer.Option(
            help="cpu (ONNX alone), rtx (a plan for RTX GPUs), tensorrt (for the GPU here).",
            show_default="cpu,rtx",
        ),
    ] = None,
    sm: Annotated[str | None, typer.Option(help=SM_HELP, show_default="all")] = None,
    max_batch: Annotated[int, typer.Option(help="The largest batch.")] = 8,
    max_length: Annotated[
        int | None, typer.Option(help="Context in tokens.", show_default="the model's")
    ] = None,
    verify: Annotated[bool, typer.Option(help="Compare every graph with PyTorch.")] = True,
    prompts: Annotated[
        Path | None,
        typer.Option(help="A prompt a line, to verify with.", show_default="built-in texts"),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the bundle at OUTPUT.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Export a checkpoint to ONNX, build its plans, verify it, and write a bundle."""
    with running() as progress:
        from .inspection import summarize_bundle
        from .pipeline import export as export_bundle

        result = export_bundle(
            model,
            output,
            precision=names(precision),
            target=names(target) if target else None,
            sms=names(sm) if sm else None,
            max_batch=max_batch,
            max_length=max_length,
            verify=verify,
            prompts=prompts,
            force=force,
            progress=progress,
        )
    show(summarize_bundle(result.bundle), as_json)


@app.command()
def build(
    bundle: BundleArgument,
    target: Annotated[str | None, typer.Option(help="rtx or tensorrt.", show_default="rtx")] = None,
    engine: Annotated[
        str | None,
        typer.Option(help="Instead of a target: tensorrt-rtx or tensorrt.", show_default=False),
    ] = None,
    sm: Annotated[str | None, typer.Option(help=SM_HELP, show_default="all")] = None,
    maximum: Annotated[
        list[str] | None,
        typer.Option("--max", help="batch=N or length=N, below the graph's.", show_default=False),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Build a TensorRT plan from a bundle's graph and add it. Needs no torch, and for rtx no GPU."""
    with running() as progress:
        from .inspection import summarize_bundle
        from .plans import build as build_plan

        result = build_plan(
            bundle,
            target=target,
            engine=engine,
            sms=names(sm) if sm else None,
            limits=dict(limit(text) for text in maximum or []),
            progress=progress,
        )
    show(summarize_bundle(result.bundle), as_json)


@app.command()
def verify(
    bundle: BundleArgument,
    source: Annotated[
        str | None, typer.Option(help="The checkpoint.", show_default="the recorded one")
    ] = None,
    backend: Annotated[str, typer.Option(help="The engine to check.")] = "ort-cpu",
    prompts: Annotated[
        Path | None, typer.Option(help="A prompt a line.", show_default="built-in texts")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Compare every graph with PyTorch, or golden data where it is absent; exit 1 if one differs."""
    with running() as progress:
        from .inspection import verification_table
        from .verification.verify import verify as verify_bundle

        report = verify_bundle(bundle, source=source, backend=backend, prompts=prompts, progress=progress)
    if as_json:
        typer.echo(json.dumps(report.to_json(), allow_nan=False))
    else:
        print_tables(verification_table(report))
    if not report.passed:
        raise typer.Exit(1)


@app.command()
def inspect(
    path: Annotated[Path, typer.Argument(help="A bundle, an .onnx file or a .plan.", show_default=False)],
    as_json: JsonOption = False,
) -> None:
    """Show what a bundle, an .onnx file or a .plan holds."""
    with running():
        from .inspection import inspect as inspect_path

        result = inspect_path(path)
    show(result, as_json)


@app.command()
def run(
    bundle: BundleArgument,
    texts: Annotated[
        list[str] | None,
        typer.Argument(metavar="[TEXT]...", help="Prompts; without any, a line each from stdin."),
    ] = None,
    input_file: Annotated[
        Path | None,
        typer.Option("--input", help='JSON lines with a "text" each.', show_default=False),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="At most so many new tokens.")] = 64,
    temperature: Annotated[
        float | None, typer.Option(help="Sample at this temperature.", show_default="greedy")
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(help="Sample from the k likeliest.", show_default="all")
    ] = None,
    top_p: Annotated[float | None, typer.Option(help="Sample from the nucleus.", show_default="all")] = None,
    repetition_penalty: Annotated[float, typer.Option(help="1.0 does nothing.")] = 1.0,
    stop: Annotated[list[str] | None, typer.Option(help="End at this text.", show_default=False)] = None,
    seed: Annotated[
        int | None,
        typer.Option(help="Make sampling repeatable.", show_default=False),
    ] = None,
    truncate: Annotated[
        str | None,
        typer.Option(help="'left' drops the beginning of too long a prompt.", show_default=False),
    ] = None,
    parse_special: Annotated[
        bool, typer.Option("--parse-special", help="Read <|endoftext|> and the like.")
    ] = False,
    backend: Annotated[str, typer.Option(help="auto or ort-cpu.")] = "auto",
    precision: Annotated[
        str | None, typer.Option(help="fp32, fp16.", show_default="the bundle's first")
    ] = None,
    threads: Annotated[int | None, typer.Option(help="Cores to use.", show_default="all")] = None,
    as_json: JsonOption = False,
) -> None:
    """Generate text from prompts. Loads no torch."""
    options = {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "repetition_penalty": repetition_penalty,
        "stop": stop,
        "seed": seed,
        "truncate": truncate,
        "parse_special": parse_special,
    }
    with running():
        from ..runtime import load

        with load(bundle, backend=backend, precision=precision, threads=threads) as model:
            for prompt in prompts_of(texts, input_file):
                if as_json:
                    answer = model.generate(prompt, max_new_tokens, **options)
                    typer.echo(json.dumps({"prompt": prompt, **answer.to_json()}, ensure_ascii=False))
                else:  # stream() checks everything before anything shows
                    show_stream(prompt, model.stream(prompt, max_new_tokens, **options))


def show_stream(prompt: str, pieces: Iterator[str]) -> None:
    """Prints a prompt, and its answer as it comes."""
    typer.echo(prompt, nl=False)
    for piece in pieces:
        typer.echo(piece, nl=False)
    typer.echo()


def prompts_of(texts: list[str] | None, input_file: Path | None) -> Iterator[str]:
    """The prompts, from the arguments, a file of JSON lines, or stdin."""
    if texts and input_file:
        raise InputError("give prompts as arguments or with --input, not both")
    if not texts and not input_file and sys.stdin.isatty():
        errors.print("[dim]a prompt a line, end with Ctrl-D[/dim]")
    lines = (line.rstrip("\r\n") for line in sys.stdin if line.strip())
    count = 0
    for prompt in texts or (json_lines(input_file) if input_file else lines):
        yield prompt
        count += 1
    if not count:
        raise InputError("there are no prompts: give arguments, lines on stdin, or --input FILE")


def json_lines(path: Path) -> Iterator[str]:
    """The "text" of every line; "-" is stdin."""
    try:
        lines = (sys.stdin.read() if str(path) == "-" else path.read_text(encoding="utf-8")).splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--input {path} cannot be read: {error}") from error
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield text_of(line, f"{path}, line {number}")


def text_of(line: str, where: str) -> str:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise InputError(f"{where} is not JSON: {error}") from error
    if not isinstance(value, dict) or not isinstance(value.get("text"), str):
        raise InputError(f'{where} must be an object with a "text", such as {{"text": "Hello"}}')
    return str(value["text"])


def names(text: str) -> list[str]:
    """A comma-separated list."""
    return [name.strip() for name in text.split(",") if name.strip()]


def limit(text: str) -> tuple[str, int]:
    """NAME=N."""
    name, _, number = text.partition("=")
    if not number.isdecimal():
        raise InputError(f"--max {text!r} must be batch=N or length=N")
    return name, int(number)


def show(result: Any, as_json: bool) -> None:
    """Prints an inspection as JSON or as tables."""
    if as_json:
        typer.echo(json.dumps(result.to_json(), ensure_ascii=False))
    else:
        print_tables(result.tables())


def print_tables(tables: list[Any]) -> None:
    """Prints tables to stdout, as wide as the terminal, or wide enough for a file."""
    Console(width=None if sys.stdout.isatty() else FILE_WIDTH).print(*tables)


@contextmanager
def running() -> Iterator[Callable[[str], None]]:
    """Shows progress on a terminal's stderr, and turns our errors into one line and exit code 1."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TimeElapsedColumn(),
    )
    bar = Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal)
    stage = bar.add_task("", total=None)

    def progress(line: str) -> None:
        bar.update(stage, description=line)
        bar.start()

    try:
        yield progress
    except PlanForgeError as error:
        bar.stop()
        if Settings.debug:
            raise
        errors.print(Text("error: ", style="red").append(str(error), style="default"))
        raise typer.Exit(1) from error
    except ModuleNotFoundError as error:
        bar.stop()
        if Settings.debug or error.name not in EXPORT_EXTRA:
            raise
        errors.print(Text(f"error: this command needs {error.name}: pip install 'planforge[export]'"))
        raise typer.Exit(1) from error
    except KeyboardInterrupt:
        bar.stop()
        errors.print("\ninterrupted; nothing was changed")
        raise typer.Exit(130) from None
    except BrokenPipeError:
        raise typer.Exit(1) from None
    finally:
        bar.stop()


def main() -> None:
    """The console script."""
    app()
