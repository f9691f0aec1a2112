"""`planforge run` of an encoder-decoder: a picture of the attention."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InputError
from .run_input import Item

if TYPE_CHECKING:
    from .. import Translator


@dataclass(frozen=True)
class Picture:
    """Where to draw the attention of a translation, and of which layer and head."""

    path: Path | None
    layer: int | None
    head: int | None

    def check(self, task: str) -> None:
        """Refuse a picture for other tasks than translation, and a layer or head without a picture."""
        if self.path is not None and task != "translate":
            raise InputError(f"--attention is no option of the task {task}")
        if self.path is None and (self.layer is not None or self.head is not None):
            raise InputError("--attention-layer and --attention-head go with --attention FILE")

    def draw_only(
        self, model: Translator, items: Iterator[Item | None], options: dict[str, Any]
    ) -> Iterator[Item | None]:
        """Draw the attention of the only text, and return an iterator over it; refuse several."""
        from ..diagnostics.plots import draw_attention

        assert self.path is not None
        texts = [item for item in items if item is not None]
        if len(texts) != 1:
            count = len(texts) or "only blank lines"
            raise InputError(f"--attention draws one text's translation, {count} were given")
        text = texts[0]
        if not isinstance(text, str):
            raise InputError("translation takes texts, not pairs of texts")
        settings = {name: value for name, value in options.items() if name not in ("batch_size", "progress")}
        draw_attention(model.align(text, **settings), self.path, layer=self.layer, head=self.head)
        return iter([text])
