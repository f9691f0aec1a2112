"""Opens a folder's graphs to compare with: in fp32, and without the rounding of activations."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import onnx_ir as ir

from ...runtime.backends.ort_program import open_plain_session
from ..passes.unrounded import skip_rounding
from .folder import WIDENED, read_graph
from .quantized import list_quantizing_nodes


def open_unrounded(path: Path) -> Any:
    """Return ONNX Runtime's session of a graph.

    Its optimizer computes other products of quantized graphs, so it stays off there.
    """
    model = read_graph(path)
    is_quantized = bool(list_quantizing_nodes(model))
    if not skip_rounding(model) and not model.meta[WIDENED]:
        return open_plain_session(path, optimized=not is_quantized)
    with TemporaryDirectory(prefix="planforge-import-", ignore_cleanup_errors=True) as folder:
        changed = Path(folder, "graph.onnx")
        ir.save(model, changed, external_data="weights.data")
        return open_plain_session(changed, optimized=not is_quantized)
