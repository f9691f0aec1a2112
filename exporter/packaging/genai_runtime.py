"""Opens a package in onnxruntime-genai.

B batch, T tokens, V vocabulary
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...runtime.diagnostics.metrics import Logits


class GenaiRun:
    """Rows of one generator; genai pads them on the right."""

    def __init__(self, model: Any, rows: int, room: int) -> None:
        import onnxruntime_genai as genai

        options = genai.GeneratorParams(model)
        options.set_search_options(max_length=room, batch_size=rows, do_sample=False, num_beams=1)
        self.generator = genai.Generator(model, options)
        self.rows = rows

    def prefill(self, prompts: Sequence[Sequence[int]]) -> Logits:
        """Read a prompt in each row; return the logits (B, V) that follow."""
        ids = np.zeros((len(prompts), max(map(len, prompts))), np.int32)
        for row, prompt in zip(ids, prompts, strict=True):
            row[: len(prompt)] = prompt
        self.generator.append_tokens(ids)
        return self.read_logits()

    def decode(self, tokens: Sequence[int]) -> Logits:
        """Read a token in each row; return the logits (B, V) that follow.

        genai takes no tokens for several rows: there they are those that it chooses itself, greedily.
        """
        if self.rows == 1:
            self.generator.append_tokens(np.array([tokens], np.int32))
        else:
            self.generator.generate_next_token()
        return self.read_logits()

    def read_logits(self) -> Logits:
        """Return the logits (B, V) of what follows."""
        return np.array(self.generator.get_logits(), np.float32).reshape(self.rows, -1)
