"""The work that all encoders here do: token ids to the last hidden states."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ...alike import digest

STATES = {"pooling": "none", "normalized": False}


class Rows:
    """The work's token ids as an array, made only when they change, so that it is not part of the time."""

    def __init__(self) -> None:
        self.prompts: Any = None
        self.ids: npt.NDArray[np.int64] = np.zeros((0, 0), np.int64)

    def of(self, work: Mapping[str, Any]) -> npt.NDArray[np.int64]:
        """Return the token ids (B, T) of a piece of work."""
        if work["prompts"] != self.prompts:
            self.prompts = work["prompts"]
            self.ids = np.asarray(self.prompts, np.int64)
        return self.ids

    def describe(self) -> dict[str, Any]:
        return {"texts_sha256": digest(self.prompts), "tokens": int(self.ids.size)}
