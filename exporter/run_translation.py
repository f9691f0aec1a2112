"""`planforge run` of an encoder-decoder: texts to translations, and a picture of the attention."""

from __future__ import annotations

import json
import sys
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from ..runtime.errors import InputError

Item = str | tuple[str, str]
BLANK_LINE = "\n"  # which no line and no argument is


@dataclass(frozen=True)
class Picture:
    """Where to draw the attention of a translation, and of which layer and head."""

    path: Path | None
    layer: int | None
    head: int | None

    def check(self, task: str) -> None:
        """Refuses a picture of a task that has none, and a layer or head of no picture."""
        if self.path is not None and task != "translate":
            raise InputError(f"--attention is no option of the task {task}")
        if self.path is None and (self.layer is not None or self.head is not None):
            raise InputError("--attention-layer and --attention-head go with --attention FILE")

    def draw(self, model: Any, text: str, options: dict[str, Any]) -> None:
        from ..runtime.plots import draw_attention

        assert self.path is not None
        draw_attention(model.align(text, **options), self.path, layer=self.layer, head=self.head)


def stopping(text: str) -> bool | str:
    """The value of --early-stopping."""
    values: dict[str, bool | str] = {"true": True, "false": False, "never": "never"}
    if text not in values:
        raise InputError(f"--early-stopping {text!r} must be true, false or never")
    return values[text]


def translate(
    model: Any,
    items: Iterator[Item],
    options: dict[str, Any],
    typed: bool,
    as_json: bool,
    picture: Picture,
    progress: Callable[[str], None],
) -> None:
    """Translates texts, in batches unless they are typed, and draws the attention of one."""
    if "early_stopping" in options:
        options["early_stopping"] = stopping(options["early_stopping"])
    texts: Iterator[str] = map(checked_text, items)
    if picture.path is not None:
        text, *more = texts
        if more:
            raise InputError(f"--attention draws one text's translation, {1 + len(more)} were given")
        picture.draw(model, text, options)
        texts = iter([text])
    if not typed and not sys.stdout.isatty():
        options["progress"] = lambda done: progress(f"{done} texts")
    several = False
    for result in with_blanks(model, texts, options, typed):
        if as_json:
            value = {"text": ""} if result is None else result.to_json()
            typer.echo(json.dumps(value, ensure_ascii=False))
        elif result is None or len(result.candidates) == 1:
            typer.echo("" if result is None else result.text)
        else:
            if several:
                typer.echo()  # between the lines of two texts
            for candidate in result.candidates:
                typer.echo(f"{candidate.text}\t{candidate.score:.4f}")
            several = True


def checked_text(item: Item) -> str:
    if not isinstance(item, str):
        raise InputError("translation takes texts, not pairs of texts")
    return item


def with_blanks(model: Any, texts: Iterator[str], options: dict[str, Any], typed: bool) -> Iterator[Any]:
    """Translations in order, and None for a blank line, so that the lines of both sides belong together."""
    blank: deque[bool] = deque()

    def others() -> Iterator[str]:
        for text in texts:
            blank.append(text == BLANK_LINE)
            if text != BLANK_LINE:
                yield text

    each = (result for text in others() for result in model.iterate([text], **options))
    for result in each if typed else model.iterate(others(), **options):
        while blank.popleft():
            yield None
        yield result
    yield from (None for _ in blank)
