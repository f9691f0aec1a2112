"""What every command shares: progress on stderr, results on stdout, errors in one line, exit codes.

Exit codes: 0, done. 1, it failed while working, or a comparison did not pass. 2, what was typed is wrong: an
option, a name, a value, or a path where nothing is. 130, Ctrl-C. 141, whoever read the output has gone. 143,
SIGTERM.
"""

from __future__ import annotations

import errno
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import typer
from rich.console import Console, RenderableType
from rich.text import Text

from ...errors import InputError, MemoryLimitError, PlanForgeError, make_printable
from ..signals import Terminated, describe_changes, forget_changes, received
from .extras import find_extra
from .stages import Stages

FILE_WIDTH = 160  # columns of a table that goes into a file or a pipe
FAILED = 1
INTERRUPTED = 130
READER_GONE = 141
UsageError: type[Exception] = typer.BadParameter.__mro__[1]  # typer gives the class no name of its own
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all but line breaks and tabs
HIGH_CONTROLS = re.compile(r"[\x7f-\x9f]")


class PlainConsole(Console):
    """A console that raises `BrokenPipeError` when nobody reads what it prints."""

    def on_broken_pipe(self) -> None:
        """Raise what rich turns into an exit code of its own."""
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


errors = PlainConsole(stderr=True, highlight=False, soft_wrap=True)


class Settings:
    """Holds what is set for the whole command."""

    debug = False  # the option given before the command
    as_json = False  # whether the command was asked for JSON, in which errors are told too
    stages: Stages | None = None  # that are shown now; they end before results are printed
    interrupted = ""  # the stage that Ctrl-C or SIGTERM interrupted, in words


@contextmanager
def show_stages() -> Iterator[Stages]:
    """Show the stages of a command: a bar on a terminal's stderr, else a line each with the time it took."""
    stages = Stages(errors)
    Settings.stages = stages
    try:
        yield stages
    except (KeyboardInterrupt, Exception) as error:
        if find_interrupt(error) is not None:  # Terminated is one too
            Settings.interrupted = stages.describe()
        raise
    finally:
        stages.end()


@contextmanager
def end_with_exit_code(context: typer.Context) -> Iterator[None]:
    """Turn what a command raises into one line on stderr and an exit code; --debug shows the traceback."""
    forget_changes()
    Settings.interrupted = ""
    Settings.as_json = False
    try:
        with end_interrupted():
            yield
    except UsageError as error:  # which typer prints
        print_error(error.format_message(), error.exit_code, error)  # type: ignore[attr-defined]
        raise
    except MemoryLimitError as error:
        fail(name_options(str(error), find_flags(context)), error.exit_code, error)
    except InputError as error:
        flags = {name: flag for name, flag in find_flags(context).items() if name == error.option}
        fail(name_options(str(error), flags), error.exit_code, error)
    except PlanForgeError as error:
        fail(str(error), error.exit_code, error)
    except ModuleNotFoundError as error:
        extra = find_extra(str(context.invoked_subcommand), str(error.name))
        if extra is None:
            raise
        fail(f"this command needs {error.name}: pip install 'planforge[{extra}]'", FAILED, error)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        fail(make_printable(f"{where}{error.strerror or error}"), FAILED, error)


@contextmanager
def end_interrupted() -> Iterator[None]:
    """Say in one line what a signal interrupted, and end the command with the signal's exit code."""
    try:
        yield
    except (KeyboardInterrupt, Exception) as error:
        interrupt = find_interrupt(error)
        if isinstance(interrupt, Terminated):
            say(f"terminated{Settings.interrupted}; {describe_changes()}")
            raise typer.Exit(128 + interrupt.number) from None
        if interrupt is None:
            raise
        say(f"\ninterrupted{Settings.interrupted}; {describe_changes()}")
        raise typer.Exit(INTERRUPTED) from None


def find_flags(context: typer.Context) -> dict[str, str]:
    """Return the flags of the options that the command which runs has, by the runtime's names for them."""
    commands: Mapping[str, Any] = getattr(context.command, "commands", {})
    command = commands.get(str(context.invoked_subcommand))
    flags = {one.name: one.opts[-1] for one in getattr(command, "params", ()) if one.opts[-1][:2] == "--"}
    if "max_memory" in flags:
        flags["memory_limit"] = flags["max_memory"]
    return flags


def name_options(message: str, flags: Mapping[str, str]) -> str:
    """Return a message of the runtime's with a command's flags instead of its names for options.

    A name that is a word too, as height, is one only before its value.
    """

    def name(found: re.Match[str]) -> str:
        word = found[0]
        return flags.get(word, word)

    return re.sub(r"\b(?:[a-z]+_[a-z_]+|[a-z]+(?==))\b", name, message)


def find_interrupt(error: BaseException | None) -> KeyboardInterrupt | None:
    """Return the interrupt that led to an error, or None.

    A library may fail while it handles an interrupt, as PyTorch's modes do, or raise an error of its own
    instead, as torch.tensor does.
    """
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__context__
    return error or (received[-1] if received else None)


def fail(message: str, code: int, error: BaseException) -> None:
    """Print what was wrong and end the command; with --debug raise the error, for its traceback."""
    print_error(message, code, error)
    if Settings.debug:
        raise error
    with suppress(OSError):  # nobody reads a stderr that cannot be written
        errors.print(Text("error: ", style="red").append(message, style="default"))
    raise typer.Exit(code) from error


def print_error(message: str, code: int, error: BaseException) -> None:
    """Print an error to stdout, for a program that asked for JSON."""
    if Settings.as_json:
        print_json({"error": {"type": type(error).__name__, "message": message, "exit_code": code}})


def say(line: str) -> None:
    """Print a line to stderr."""
    with suppress(OSError):
        errors.print(line, markup=False)


def emit(text: str, end: str = "\n") -> None:
    """Print to stdout; control characters of a model's text reach a pipe, never a terminal."""
    if sys.stdout.isatty():
        if Settings.stages is not None:
            Settings.stages.clear()
        text = escape_controls(text)
    with guard_stdout():
        sys.stdout.write(text + end)  # typer.echo would take escape sequences out of what goes to a pipe


def escape_controls(text: str) -> str:
    r"""Return the text with its control characters written out, as \x1b, but for line breaks and tabs."""
    return CONTROLS.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def format_json(value: Any, indent: int | None = None) -> str:
    r"""Return a value as JSON without a control character: those of C1 as \u009b, as JSON has the others."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, indent=indent)
    return HIGH_CONTROLS.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def print_json(value: Any, indent: int | None = None) -> None:
    """Print a value as JSON, whose strings hold no control characters, after ending the stages."""
    print_lines([format_json(value, indent)])


def print_lines(lines: Iterable[str]) -> None:
    """Print our own lines, never folded, after ending the stages."""
    end_stages()
    with guard_stdout():
        for line in lines:
            sys.stdout.write(line + "\n")


def print_tables(tables: Sequence[RenderableType]) -> None:
    """Print tables to stdout with an empty line between two, as wide as the terminal or `FILE_WIDTH`."""
    parts = [part for table in tables for part in ("", table)][1:]
    end_stages()
    with guard_stdout():
        if sys.stdout.isatty():
            PlainConsole().print(*parts, sep="\n")
            return
        console = PlainConsole(width=FILE_WIDTH)
        with console.capture() as capture:
            console.print(*parts, sep="\n")
        for line in capture.get().splitlines():
            sys.stdout.write(line.rstrip() + "\n")


def show(result: Any, as_json: bool) -> None:
    """Print an inspection as JSON, or as tables and what to say below them."""
    if as_json:
        print_json(result.to_json())
        return
    print_tables(result.tables())
    if result.notes:
        print_lines(("", *result.notes))


def end_stages() -> None:
    if Settings.stages is not None:
        Settings.stages.end()


@contextmanager
def guard_stdout() -> Iterator[None]:
    """Turn errors of writing to stdout into an exit code, and keep Python from trying again at its end."""
    try:
        yield
        sys.stdout.flush()
    except OSError as error:
        give_up_stdout()
        if isinstance(error, BrokenPipeError) or error.errno == errno.EINVAL:  # Windows says the latter
            raise typer.Exit(READER_GONE) from None
        raise OSError(error.errno, f"the output cannot be written: {error.strerror}") from error


def give_up_stdout() -> None:
    """Discard what is left in stdout's buffer."""
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def list_names(text: str) -> list[str]:
    """Return the names in a comma-separated list."""
    return [name.strip() for name in text.split(",") if name.strip()]


def split_names(option: str, text: str | None) -> list[str] | None:
    """Return the names in an option's comma-separated list; None where it was not given. Refuse no names."""
    if text is None:
        return None
    names = list_names(text)
    if not names:
        raise InputError(f"{option} {text!r} has no names; give names separated by commas, or leave it out")
    return names
