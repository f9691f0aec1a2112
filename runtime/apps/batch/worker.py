"""The worker: a model that answers batches of rows, where a row that cannot be answered gets an error."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pyarrow as pa

from ...errors import InputError
from ...load import load
from .tasks import (
    ERROR,
    OF_ONE_ROW,
    TEXT,
    TOKENS,
    Item,
    Output,
    check_task_options,
    describe_error,
    find_task,
    list_output_types,
    list_task_options,
    read_messages,
)
from .values import check_size, list_values, read_text

if TYPE_CHECKING:
    from ...options import LoadOptions

NEW_TOKENS = "max_new_tokens"  # the option that says how long an answer may take


class BatchWorker:
    """A bundle's model that answers batches: `ray.data.Dataset.map_batches` takes the class.

    It loads the model once, when it is made, and answers a row then, so that what it cannot do is said before
    the first batch. It can be pickled: its copy loads the model itself.

    Args:
        bundle: the folder that `planforge export` wrote, at the same path on every machine.
        task: "embed", "embed_sparse", "embed_multi", "embed_hybrid", "classify", "rank", "tag", "answer",
            "fill_mask", "translate", "generate", "chat" or "score".
        columns: the batch's columns by the task's: {"text": "body"}. A task reads "text" ("prompt" of
            generate, "messages" of chat, "query" and "text" of rank, "question" and "context" of answer)
            unless another one is named; classify also "pair", where it is named.
        options: those of the method that answers, such as {"max_new_tokens": 40}.
        load_options: see `LoadOptions`; threads are the CPUs that Ray gave the actor, and one without a GPU
            runs on the CPU, unless they are given.

    Raises:
        InputError: no such task, column or option, or the model does not do the task.
        PlanForgeError: what else `load` raises.

    Example:
        >>> dataset.map_batches(
        ...     BatchWorker,
        ...     fn_constructor_args=("build/bert-demo", "embed"),
        ...     compute=ray.data.ActorPoolStrategy(size=2),
        ...     num_cpus=1,
        ...     batch_size=1000,
        ... )
    """

    def __init__(
        self,
        bundle: str | Path,
        task: str,
        *,
        columns: Mapping[str, str] | None = None,
        options: Mapping[str, Any] | None = None,
        load_options: LoadOptions | None = None,
    ) -> None:
        self._remake = partial(
            BatchWorker, bundle, task, columns=columns, options=options, load_options=load_options
        )
        self.task = find_task(task)
        self.columns = resolve_columns(task, columns or {})
        self.options = dict(options or {})
        check_task_options(self.task, self.options)
        model = load(bundle, **cast("LoadOptions", {**ask_ray(), **(load_options or {})}))
        try:
            if model.task != self.task.model:
                raise InputError(f"{bundle}: {model!r} does not support the task {task!r}")
            self.model: Any = model
            self._longest = model.count_longest_text()
            probe = [self.task.probe(self.model)]
            (output,) = self.task.answer(self.model, probe, self._list_probe_options())
            if ERROR in output:
                raise InputError(output[ERROR])
        except BaseException:
            model.close()
            raise

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        return self._remake, ()

    def __call__(self, batch: Mapping[str, np.ndarray]) -> pa.Table:
        """Return a batch of `map_batches` with the columns that `answer` returns."""
        from ray.data.block import BlockAccessor

        table = BlockAccessor.batch_to_block(batch)
        answers = self.answer(table)
        for name in answers.column_names:
            if name in table.column_names:
                raise InputError(
                    f"the data set already has a column {name!r}, which the answers add; rename or drop it"
                )
            table = table.append_column(name, answers[name])
        return table

    def answer(self, batch: Mapping[str, Sequence[Any]] | pa.Table) -> pa.Table:
        """Return the answers to a batch's rows.

        Args:
            batch: columns by their names: sequences, numpy arrays or Arrow's.

        Returns:
            A table with a row for each of the batch's: the task's columns, "tokens" and "error", which is
            null where the row was answered; else it says why not, and the others are null.

        Raises:
            InputError: a column is missing.
            BackendError: the engine fails.
        """
        table_columns = batch.column_names if isinstance(batch, pa.Table) else list(batch)
        for column in self.columns.values():
            if column not in table_columns:
                raise InputError(f"there is no column {column!r}; there are: {', '.join(table_columns)}")
        columns = [list_values(batch[column]) for column in self.columns.values()]
        return self.make_table(self.answer_rows(list(zip(*columns, strict=True))))

    def answer_rows(self, rows: Sequence[Sequence[Any]]) -> list[Output]:
        """Return the outputs, or the error, of rows: of each its values, in the order of `columns`."""
        outputs: list[Output] = [{} for _ in rows]
        items: list[tuple[int, Item]] = []
        for number, row in enumerate(rows):
            try:
                items.append((number, self._read_item(row)))
            except InputError as error:
                outputs[number] = {ERROR: str(error)}
        items.sort(key=lambda entry: measure(entry[1]))  # what runs together is padded to the longest
        answers = self._answer_items([item for _, item in items])
        for (number, _), output in zip(items, answers, strict=True):
            outputs[number] = output
        return outputs

    def make_table(self, outputs: Iterable[Output]) -> pa.Table:
        """Return outputs as a table."""
        rows = list(outputs)
        types = {**list_output_types(self.task, self.options), TOKENS: pa.int64(), ERROR: TEXT}
        return pa.table(
            {name: pa.array([row.get(name) for row in rows], type=kind) for name, kind in types.items()}
        )

    def close(self) -> None:
        """Free the engine."""
        self.model.close()

    def _list_probe_options(self) -> dict[str, Any]:
        """Return the options of the first row: its answer is cheap, but what cannot be used is refused."""
        given = self.options.get(NEW_TOKENS, 2)
        if NEW_TOKENS in list_task_options(self.task) and isinstance(given, int) and given > 1:
            return {**self.options, NEW_TOKENS: 1}
        return self.options

    def _read_item(self, row: Sequence[Any]) -> Item:
        """Return a row as the model takes it."""
        if "messages" in self.columns:
            messages = read_messages(
                row[0] if is_list(row[0]) else read_text("messages", row[0], self._longest)
            )
            size = sum(len(str(message.get("content"))) for message in messages)
            check_size("messages", size, self._longest)
            return messages
        texts = [read_text(name, value, self._longest) for name, value in zip(self.columns, row, strict=True)]
        return texts[0] if len(texts) == 1 else tuple(texts)

    def _answer_items(self, items: Sequence[Item]) -> list[Output]:
        """Return outputs; where an item cannot be answered, find it by halves."""
        outputs: list[Output] = []
        try:
            for output in self.task.answer(self.model, items, self.options):
                outputs.append(output)  # kept where a later one cannot be answered
        except OF_ONE_ROW as error:
            rest = items[len(outputs) :]
            if len(rest) == 1:
                return [*outputs, {ERROR: describe_error(error)}]
            middle = len(rest) // 2
            return [*outputs, *self._answer_items(rest[:middle]), *self._answer_items(rest[middle:])]
        return outputs


def resolve_columns(task: str, columns: Mapping[str, str]) -> dict[str, str]:
    """Return the column to read for each of a task's inputs."""
    inputs = find_task(task).inputs
    optional = find_task(task).optional
    known = (*inputs, optional) if optional else inputs
    for name in columns:
        if name not in known:
            raise InputError(f"the task {task!r} has no input {name!r}; its inputs: {', '.join(known)}")
    return {name: columns.get(name, name) for name in known if name in inputs or name in columns}


def ask_ray() -> LoadOptions:
    """Return what Ray's resources of this worker say of how to load a model; nothing outside a worker."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return {}
    context = ray.get_runtime_context()
    if context.worker.mode != ray.WORKER_MODE:
        return {}
    resources = context.get_assigned_resources()
    options: LoadOptions = {"threads": max(1, int(resources.get("CPU", 1)))}
    if not resources.get("GPU"):
        options["backend"] = "ort-cpu"
    return options


def is_list(value: Any) -> bool:
    """Return whether a value is a list, or an array of numpy's."""
    if isinstance(value, np.ndarray):
        return value.ndim == 1
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def measure(item: Item) -> int:
    """Return about how long an item is."""
    if isinstance(item, str):
        return len(item)
    return sum(len(part) if isinstance(part, str) else len(str(part)) for part in item)
