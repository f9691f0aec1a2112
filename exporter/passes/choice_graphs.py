"""Writes the graph by which the runtime chooses tokens on a GPU.

`python -m planforge.exporter.passes.choice_graphs` writes it into the runtime's folder.

N rows, V vocabulary, K candidates
"""

from __future__ import annotations

from pathlib import Path

from ...runtime.backends.token_choice import GRAPHS

# The largest logit is subtracted before the exponentials, so that none overflows. 6 is int32.
TEXTS = {
    "candidates": """<ir_version: 6, opset_import: ["" : 11]>
candidates (float[rows, vocabulary] logits, int64[1] count)
  => (float[rows, count] candidate_logits, int32[rows, count] candidate_ids, float[rows, 1] log_sum)
{
    candidate_logits, places = TopK <axis = -1> (logits, count)
    candidate_ids = Cast <to = 6> (places)
    largest = ReduceMax <axes = [-1], keepdims = 1> (logits)
    below = Sub (logits, largest)
    parts = Exp (below)
    sum = ReduceSum <axes = [-1], keepdims = 1> (parts)
    log = Log (sum)
    log_sum = Add (log, largest)
}""",
}


def make_choice_graphs() -> dict[str, bytes]:
    """Return the content of each graph's file, by its name."""
    from onnx import checker, parser

    graphs = {}
    for name, text in TEXTS.items():
        model = parser.parse_model(text)
        for node in model.graph.node:
            node.name = node.output[0]
        checker.check_model(model, full_check=True)
        graphs[f"{name}.onnx"] = model.SerializeToString(deterministic=True)
    return graphs


def write_choice_graphs(folder: Path = GRAPHS) -> None:
    """Write the graphs into the runtime's folder for them."""
    folder.mkdir(exist_ok=True)
    for name, content in make_choice_graphs().items():
        (folder / name).write_bytes(content)


if __name__ == "__main__":
    write_choice_graphs()
