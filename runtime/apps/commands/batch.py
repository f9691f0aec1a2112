"""`planforge batch`: an answer for each row of a table, by this machine's processes or a Ray cluster."""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...errors import InputError
from .console import FAILED, print_json, print_tables, say, show_stages
from .run_options import BackendOption, BundleArgument, JsonOption, PrecisionOption, make_option
from .tables import FittingTable

if TYPE_CHECKING:
    from ..batch import BatchResult

worker_option = partial(make_option, panel="Workers")

TaskOption = Annotated[
    str,
    make_option(
        "embed, embed_sparse, embed_multi, embed_hybrid, classify, rank, tag, answer, fill_mask, translate,"
        " generate, chat or score."
    ),
]
InputOption = Annotated[
    str,
    make_option(
        "A file or a folder of .parquet, .jsonl, .csv or .txt (a row a line), or an address such as"
        " s3://bucket/folder.",
        "--input",
    ),
]
OutputOption = Annotated[
    str,
    make_option(
        "The folder to write part-NNNNNN.parquet files to, or its address.",
        "--output",
        "-o",
    ),
]
ColumnOption = Annotated[
    list[str] | None,
    make_option(
        "The input column with the texts; for a task that reads two, NAME=COLUMN for each, such as"
        " query=title.",
        show_default="text; prompt, messages, query and text, question and context",
    ),
]
IdOption = Annotated[
    str | None, make_option("The input column with ids.", "--id", show_default="made from file and row")
]
TaskOptionsOption = Annotated[
    list[str] | None,
    make_option(
        "NAME=VALUE, an option of the task's Python method, such as max_new_tokens=40; the value is JSON or"
        " text. May be repeated.",
        "--option",
    ),
]
RowsOption = Annotated[
    int | None,
    make_option(
        "Rows in each output file.",
        show_default="1000; translate, score 200; embed_multi, embed_hybrid, generate, chat 100",
        minimum=1,
    ),
]
WorkersOption = Annotated[
    int | None, worker_option("Processes on this machine.", show_default="its cores / --threads", minimum=1)
]
ThreadsOption = Annotated[int, worker_option("Threads of each worker.", show_default=True, minimum=1)]
AddressOption = Annotated[
    str | None,
    worker_option(
        'A Ray cluster: "auto", "ray://host:10001", "host:6379", or "local", which starts one here.',
        show_default="no Ray",
    ),
]
GpusOption = Annotated[float, worker_option("GPUs of each worker, on a cluster.", show_default=True)]


def batch(
    bundle: BundleArgument,
    task: TaskOption,
    input: InputOption,
    output: OutputOption,
    column: ColumnOption = None,
    id_column: IdOption = None,
    option: TaskOptionsOption = None,
    rows_per_part: RowsOption = None,
    workers: WorkersOption = None,
    threads: ThreadsOption = 1,
    address: AddressOption = None,
    gpus: GpusOption = 0,
    backend: BackendOption = "auto",
    precision: PrecisionOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compute an answer for each row of a table; run the same command again to resume."""
    from ..batch import run_batch
    from ..batch.tasks import find_task

    load_options: dict[str, Any] = {} if backend == "auto" else {"backend": backend}
    if precision is not None:
        load_options["precision"] = precision
    with show_stages() as stages:
        result = run_batch(
            bundle,
            task,
            input,
            output,
            columns=name_columns(column or [], find_task(task).inputs),
            id_column=id_column,
            options=read_task_options(option or []),
            load_options=load_options,
            workers=workers,
            threads=threads,
            gpus=gpus,
            address=address,
            rows_per_part=rows_per_part,
            progress=stages,
        )
    if as_json:
        print_json(result.to_json())
    else:
        print_tables(list_tables(result))
    if result.errors == result.rows:
        say(f"every row has an error; the column 'error' in {result.output} says why")
        raise typer.Exit(FAILED)


def name_columns(arguments: list[str], inputs: tuple[str, ...]) -> dict[str, str]:
    """Return the columns of --column by the task's."""
    columns: dict[str, str] = {}
    for argument in arguments:
        name, equals, column = argument.partition("=")
        if not equals:
            if len(inputs) > 1:
                names = " ".join(f"--column {name}=..." for name in inputs)
                raise InputError(
                    f"--column {argument}: the task reads several columns; give {names}", option="column"
                )
            name = inputs[0]
            column = argument
        if name in columns:
            raise InputError(f"--column {argument}: {name} is given already; give it once", option="column")
        columns[name] = column
    return columns


def read_task_options(arguments: list[str]) -> dict[str, Any]:
    """Return the values of --option by their names."""
    options: dict[str, Any] = {}
    for argument in arguments:
        name, value = parse_option(argument)
        if name in options:
            raise InputError(f"--option {argument}: {name} is given already; give it once", option="option")
        options[name] = value
    return options


def parse_option(argument: str) -> tuple[str, Any]:
    """Return the name and the value of NAME=VALUE."""
    name, equals, value = argument.partition("=")
    if not equals:
        raise InputError(
            f"--option {argument}: must be NAME=VALUE, such as max_new_tokens=40", option="option"
        )
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def list_tables(result: BatchResult) -> list[FittingTable]:
    """Return what a job came to, and what each worker did."""
    summary = [
        ("rows", f"{result.rows:,}"),
        ("errors", f"{result.errors:,}"),
        *([("one of them", result.example)] if result.example else []),
        ("tokens", f"{result.tokens:,}"),
        ("computed now", f"{result.computed:,} rows in {result.seconds:,.1f} s"),
        ("output", f"{result.output}: {result.parts:,} file{'' if result.parts == 1 else 's'}"),
    ]
    tables = [FittingTable("", ("", ""), summary)]
    if result.workers:
        rows = [(name, f"{w.rows:,}", f"{w.rate:,.1f}") for name, w in sorted(result.workers.items())]
        tables.append(FittingTable("", ("worker", "rows", "rows/s"), rows, numbers=("rows", "rows/s")))
    return tables
