"""Sound bundles and checkpoints, small ones, that are then damaged."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from ..helpers.models import one_layer_gpt2, tiny_bert, write_wordpiece
from ..helpers.translation import write_varied_marian

TEMPLATE = "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}<|assistant|>"
LABELLED = "".join(f"the {word} is {n}\t{word}\n" for n in range(12) for word in ("plan", "forge"))
PROMPT = "In the beginning\tgod\nAnd it came to pass\tpeople\n"


def make_material(folder: Path) -> None:
    """Export a decoder, two encoders and a translator of random weights."""
    from planforge.exporter import export

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    checkpoint = one_layer_gpt2(folder / "decoder/checkpoint")
    (checkpoint / "chat_template.jinja").write_text(TEMPLATE)
    tiny_bert(
        folder / "encoder/checkpoint", "BertForSequenceClassification", num_labels=3, num_hidden_layers=1
    )
    write_wordpiece(folder / "encoder/checkpoint")
    tiny_bert(folder / "plain/checkpoint", "BertForPreTraining", num_hidden_layers=1)
    write_wordpiece(folder / "plain/checkpoint")
    write_varied_marian(folder / "translator/checkpoint")
    for name in ("decoder", "encoder", "plain", "translator"):
        target = ["cpu", "portable", "rtx"] if name == "decoder" else ["cpu", "portable"]
        precision = ["fp32", "fp16"] if name == "decoder" else ["fp32"]
        export(folder / name / "checkpoint", folder / name / "bundle", target=target, precision=precision)
    add_to_decoder(folder / "decoder")
    make_import(folder / "encoder")
    (folder / "plain/labelled.tsv").write_text(LABELLED)
    (folder / "done").touch()


def add_to_decoder(folder: Path) -> None:
    """Write its traced graphs, and a prompt."""
    write_traces(folder)
    (folder / "prompt").mkdir()
    (folder / "prompt/prompt.txt").write_text(PROMPT)


def write_traces(folder: Path) -> None:
    """Trace a decoder's checkpoint, as an export of it for cpu and portable does."""
    from planforge.exporter.checkpoints.checkpoint import Checkpoint
    from planforge.exporter.checkpoints.source import resolve_source
    from planforge.exporter.tracing.trace import read_traced, start_tracer

    checkpoint = folder / "checkpoint"
    choices = Checkpoint(resolve_source(checkpoint)).choices
    (folder / "traced").mkdir()
    for recipe in ("decoder.ort", "decoder.portable"):
        out = folder / "traced" / recipe
        read_traced(start_tracer(checkpoint, recipe, choices, out), out)


def make_import(folder: Path) -> None:
    """Write a folder as optimum does, of an encoder's own portable graph."""
    import onnx

    shutil.copytree(folder / "checkpoint", folder / "import", ignore=shutil.ignore_patterns("*.safetensors"))
    (graph,) = (folder / "bundle/onnx").glob("encoder.portable.fp32*.onnx")
    model = onnx.load(graph)
    onnx.save(model, folder / "import/model.onnx", save_as_external_data=True, location="model.onnx_data")


if __name__ == "__main__":
    make_material(Path(sys.argv[1]))
