"""What all commands share: stages, tables, exit codes, hints, and text that goes to a terminal."""

from __future__ import annotations

import io
import json
import re
import signal
import threading
import time
from importlib.metadata import requires

import pytest
import typer
from packaging.requirements import Requirement
from rich.console import Console
from rich.progress import Progress

from planforge.exporter.errors import (
    BuildOptionError,
    HubError,
    OutputError,
    PromptsError,
    SourceError,
    VerificationError,
)
from planforge.exporter.targets import find_target
from planforge.runtime.apps.commands.console import (
    end_with_exit_code,
    escape_controls,
    format_json,
    show_stages,
)
from planforge.runtime.apps.commands.extras import EXTRAS, OF_COMMAND, find_extra
from planforge.runtime.apps.commands.stages import Bar, Stages, make_columns
from planforge.runtime.apps.commands.tables import FittingTable, share_widths
from planforge.runtime.apps.signals import Terminated
from planforge.runtime.apps.stage_progress import BYTES, CountedLine, Notice, StageCounter
from planforge.runtime.errors import (
    BackendUnavailableError,
    BundleError,
    BundleNotFoundError,
    ContextLengthError,
    DataError,
    InputError,
    ManifestError,
    PlanForgeError,
)
from planforge.runtime.suggest import did_you_mean


def stages_of(file: io.StringIO) -> Stages:
    return Stages(Console(file=file, width=200))


def test_off_a_terminal_each_stage_is_a_line_with_its_time() -> None:
    file = io.StringIO()
    stages = stages_of(file)
    stages("tracing decoder.ort")
    assert file.getvalue() == ""
    stages("verifying decoder.ort.fp32: greedy")
    stages("verifying decoder.ort.fp32: full context")
    stages.count(12)  # texts are told every half minute
    assert re.fullmatch(r" while verifying decoder.ort.fp32, after \d+ s", stages.describe())
    stages.end()
    assert stages.describe() == ""
    lines = file.getvalue().splitlines()
    assert [re.fullmatch(r"(.*) \(\d+\.\d s\)", line)[1] for line in lines] == [  # type: ignore[index]
        "tracing decoder.ort",
        "verifying decoder.ort.fp32",
    ]


def test_what_another_thread_does_beside_is_said_when_it_begins() -> None:
    file = io.StringIO()
    stages = stages_of(file)
    stages("checking")
    other = threading.Thread(target=stages, args=("building a plan for sm86",))
    other.start()
    other.join()
    assert file.getvalue() == "building a plan for sm86 ...\n"
    stages.end()
    assert file.getvalue().splitlines()[1].startswith("checking (")


def test_on_a_terminal_a_bar_is_gone_before_results_are_printed() -> None:
    file = io.StringIO()
    stages = Stages(Console(file=file, width=80, force_terminal=True))
    stages("tracing")
    stages.end()
    shown = file.getvalue()
    assert "tracing" in shown and shown.endswith("\x1b[2K")  # the line is erased
    stages.end()
    assert file.getvalue() == shown


def test_a_terminal_shows_what_is_done_and_of_how_much() -> None:
    file = io.StringIO()
    stages = Stages(Console(file=file, width=120, force_terminal=True, color_system=None))
    count = StageCounter(stages, "writing ONNX files: fp32", BYTES)
    count(0, 2_000_000_000)
    for number, case in enumerate(("greedy", "full context")):
        stages(CountedLine(f"verifying decoder: {case}", number, 2, "cases"))
    stages.end()
    shown = file.getvalue()
    assert re.search(r"writing ONNX files: fp32 +\S* +0 of 2,000 MB +0:00:00 +-:--:--", shown)
    assert re.search(r"verifying decoder: full context +\S* *\S* +1 of 2 cases +0:00:00", shown)


def test_the_remaining_time_follows_from_the_speed() -> None:
    now = [0.0]
    bars = Progress(*make_columns(), console=Console(file=io.StringIO()), get_time=lambda: now[0])
    bar = Bar(bars)
    for done in range(4):
        bar.show(CountedLine("writing", done, 10, "files"))
        now[0] += 5.0
    (task,) = bars.tasks
    assert task.time_remaining == pytest.approx(35, abs=1)
    bar.show(CountedLine("verifying: greedy", 0, 3, "cases"))  # begins anew
    (task,) = bars.tasks
    assert (task.total, task.completed, task.time_remaining) == (3, 0, None)
    bar.show("committing")
    (task,) = bars.tasks
    assert (task.total, task.fields["count"]) == (None, "")


def test_off_a_terminal_counts_are_no_lines_and_notices_are() -> None:
    file = io.StringIO()
    stages = stages_of(file)
    stages(Notice("the export needs about 1.2 GB of memory"))
    count = StageCounter(stages, "writing ONNX files", BYTES)
    for done in range(5):
        count(done, 4)
    stages.end()
    need, wrote = file.getvalue().splitlines()
    assert need == "the export needs about 1.2 GB of memory"
    assert re.fullmatch(r"writing ONNX files \(\d+\.\d s\)", wrote)


def test_off_a_terminal_what_is_done_and_left_is_said_each_half_minute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    file = io.StringIO()
    stages = stages_of(file)
    for done in range(5):
        stages(CountedLine(f"verifying decoder: case {done}", done, 8, "cases"))
        now[0] += 16.0
    stages(CountedLine("computing: 0 of 9 parts", 0, 9, "parts"))
    now[0] += 40.0
    stages(CountedLine("computing: 0 of 9 parts", 0, 9, "parts"))  # nothing tells how long it will take
    stages.end()
    assert file.getvalue().splitlines() == [
        "verifying decoder: 2 of 8 cases, about 96 s left (32 s)",  # a case takes 16 s
        "verifying decoder: 4 of 8 cases, about 64 s left (64 s)",
        "verifying decoder (80.0 s)",
        "computing: 0 of 9 parts (40 s)",
        "computing (40.0 s)",
    ]


def test_a_callable_that_takes_lines_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 100.0)  # all at once: only the ends are told
    lines: list[str] = []
    count = StageCounter(lines.append, "tracing decoder.ort", "graphs")
    for done in range(4):
        count(done, 3)
    assert lines == ["tracing decoder.ort: 0 of 3 graphs", "tracing decoder.ort: 3 of 3 graphs"]
    assert [(line.done, line.total, line.unit) for line in lines if isinstance(line, CountedLine)] == [
        (0, 3, "graphs"),
        (3, 3, "graphs"),
    ]


def test_threads_have_bars_of_their_own() -> None:
    file = io.StringIO()
    stages = Stages(Console(file=file, width=120, force_terminal=True, color_system=None))
    stages("verifying decoder")
    other = threading.Thread(target=stages, args=("building a plan for sm86",))
    other.start()
    other.join()
    assert "verifying decoder" in file.getvalue() and "building a plan" in file.getvalue()
    file.truncate(0)
    stages("verifying encoder")  # the other thread has ended, and its bar with it
    assert stages._bars is not None and len(stages._bars.tasks) == 1
    stages.end()


def make_failed_handling() -> RuntimeError:
    """Return an error of a library that a signal interrupted, as PyTorch's of its mode stack."""
    error = RuntimeError("trying to pop from empty mode stack")
    error.__context__ = Terminated(signal.SIGTERM)
    return error


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (Terminated(signal.SIGTERM), 143, "terminated"),
        (make_failed_handling(), 143, "terminated"),
    ],
)
def test_an_interrupted_command_says_which_stage_it_was_in(
    error: BaseException, code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def command(stage: str) -> str:
        """What a command that the error ends in a stage says last."""
        context = typer.Context(typer.core.TyperGroup())
        ends = pytest.raises(typer.Exit)
        with ends as caught, end_with_exit_code(context), show_stages() as stages:
            if stage:
                stages(stage)
            raise error
        assert caught.value.exit_code == code
        return capsys.readouterr().err.splitlines()[-1]

    said = command("tracing decoder.ort: step")
    assert re.fullmatch(rf"{words} while tracing decoder.ort, after \d+ s; nothing was changed", said)
    assert command("") == f"{words}; nothing was changed"


def printed(table: FittingTable, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    console.print(table)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]


WIDE = FittingTable(
    "found",
    ("graph", "target", "verdict"),
    [
        ("onnx/decoder.portable.fp32-67af3daf.onnx", "rtx", "nothing found"),
        ("a.onnx", "cpu", "2 errors, 1 warning"),
    ],
)


def test_a_table_is_side_by_side_where_it_fits() -> None:
    assert printed(WIDE, 120) == [
        "found",
        "graph                                     target  verdict",
        "onnx/decoder.portable.fp32-67af3daf.onnx  rtx     nothing found",
        "a.onnx                                    cpu     2 errors, 1 warning",
    ]


def test_a_narrower_table_breaks_between_words() -> None:
    lines = printed(WIDE, 60)
    assert all(len(line) <= 60 for line in lines)
    assert {"onnx/decoder.portable.fp32-67af3daf.onnx", "warning"} <= set(" ".join(lines).split())


def test_rows_that_do_not_fit_are_told_line_by_line() -> None:
    assert printed(WIDE, 50) == [
        "found",
        "graph    onnx/decoder.portable.fp32-67af3daf.onnx",
        "target   rtx",
        "verdict  nothing found",
        "",
        "graph    a.onnx",
        "target   cpu",
        "verdict  2 errors, 1 warning",
    ]


@pytest.mark.parametrize("width", [80, 100, 120])
def test_no_column_of_a_long_text_has_a_line_for_each_word(width: int) -> None:
    """As in lint's findings: a file's long name leaves the other texts little room."""
    name = "onnx/decoder.portable.fp32-76c90290.onnx"
    cells = ("warning", "int64-input", "jetpack5.1", f"{name}: 4 tensors: input_ids, attention_mask, ...")
    texts = ("int64 becomes int32: larger numbers are cut", "feed int32 there; ids and positions fit")
    table = FittingTable(
        "", ("severity", "rule", "targets", "where", "what is wrong", "fix"), [(*cells, *texts)]
    )
    lines = printed(table, width)
    assert max(map(len, lines)) <= width
    assert any(re.search(r"\bfeed int32\b", line) for line in lines) and len(lines) < 8


def test_room_goes_to_the_texts_of_most_lines() -> None:
    assert share_widths([8, 8], [120, 40], 80) == [60, 20]


@pytest.mark.parametrize("room", [10, 15, 20, 100])
def test_widths_fill_the_room_and_no_more(room: int) -> None:
    widths = share_widths([4, 6, 5], [10, 6, 9], room)
    assert sum(widths) == min(room, 25)
    if room >= 15:
        assert all(width >= least for width, least in zip(widths, [4, 6, 5], strict=True))


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InputError("x"), 2),
        (ContextLengthError("x", tokens=2, limit=1), 2),
        (SourceError("x"), 2),
        (BundleNotFoundError("x"), 2),
        (BuildOptionError("x"), 2),
        (PromptsError("x"), 2),
        (DataError("x"), 1),
        (HubError("x"), 1),
        (BundleError("x"), 1),
        (ManifestError("x"), 1),
        (OutputError("x"), 1),
        (VerificationError("x"), 1),
        (BackendUnavailableError("x"), 1),
    ],
)
def test_what_was_typed_wrong_is_2_and_what_failed_is_1(error: PlanForgeError, code: int) -> None:
    assert error.exit_code == code


@pytest.mark.parametrize(
    ("command", "module", "extra"),
    [
        ("export", "onnx_ir", "export"),
        ("export", "torch", "export"),
        ("export", "transformers", "export"),
        ("import", "transformers", "export"),
        ("lint", "onnx_ir", "verify"),
        ("inspect", "onnx_ir", "verify"),
        ("verify", "jinja2", "verify"),
        ("verify", "torch", "export"),
        ("fit-head", "sklearn", "fit"),
        ("build", "onnx", "tensorrt-rtx"),
        ("run", "onnxruntime.capi", "cpu"),
        ("run", "jinja2", "chat"),
        ("run", "matplotlib", "plot"),
        ("run", "something_else", None),
    ],
)
def test_the_extra_of_the_command_is_named(command: str, module: str, extra: str | None) -> None:
    assert find_extra(command, module) == extra


def test_extras_bring_what_pyproject_says() -> None:
    modules = {"scikit-learn": "sklearn", "tensorrt-rtx-cu13": "tensorrt_rtx", "cuda-bindings": "cuda"}
    modules |= {"onnxruntime-gpu": "onnxruntime"}
    declared = [Requirement(text) for text in requires("planforge") or []]

    def brought(extra: str) -> set[str]:
        found: set[str] = set()
        for requirement in declared:
            if f'extra == "{extra}"' not in str(requirement.marker):
                continue
            if requirement.name == "planforge":
                found = found.union(*map(brought, requirement.extras))
            else:
                found.add(modules.get(requirement.name, requirement.name.replace("-", "_")))
        return found

    for extra, known in EXTRAS.items():
        assert known == brought(extra), extra
    assert set(OF_COMMAND.values()) <= set(EXTRAS)


@pytest.mark.parametrize(
    ("name", "known", "hint"),
    [
        ("gpt2-dmo", ["bert-demo", "gpt2-demo"], "; did you mean 'gpt2-demo'?"),
        ("jetson", ["cpu", "jetpack6.0", "jetpack6.2"], "; did you mean 'jetpack6.0' or 'jetpack6.2'?"),
        ("FP16", ["fp16", "int8"], "; did you mean 'fp16'?"),
        ("toaster", ["cpu", "rtx"], ""),
        ("", ["cpu"], ""),
    ],
)
def test_a_name_that_is_not_there_gets_a_suggestion(name: str, known: list[str], hint: str) -> None:
    assert did_you_mean(name, known) == hint


def test_a_gpu_as_a_target_gets_the_targets_for_gpus() -> None:
    with pytest.raises(InputError, match=r"'gpu' is not one of .*; did you mean 'cuda' .*, or 'rtx'"):
        find_target("gpu")


def test_control_characters_are_written_out() -> None:
    assert escape_controls("a\tb\nc\x1b[31m\x9b\x07\r\x7fé") == "a\tb\nc\\x1b[31m\\x9b\\x07\\r\\x7fé"
    line = format_json({"text": "\x1b\x9b\x7fé"})
    assert not re.search(r"[\x00-\x1f\x7f-\x9f]", line) and "é" in line
    assert json.loads(line) == {"text": "\x1b\x9b\x7fé"}
