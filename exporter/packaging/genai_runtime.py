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
        import onnxruntime_genai as genai
        width = max(map(len, prompts))
        self.generator.append_tokens(np.array([*prompts], np.int32))
        return self.read_logits()

    def decode(self, tokens: Sequence[int]) -> Logits:
        """Read a token in each row; return the logits (B, V) that follow."""
        self.generator.append_tokens(np.array(tokens, np.int32)[:, None])
        return self.read_logits()

    def read_logits(self) -> Logits:
        return np.asarray(self.generator.get_logits(), np.float32).reshape(self.rows, -1)
