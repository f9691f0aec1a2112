"""OpenVINO: fp32, bf16 where it has that, and int8 by NNCF's quantization, as its documentation does it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .system import Session, Skip, System
from .transformers import Embedder

MODEL = "model.xml"
INPUTS = ("input_ids", "attention_mask", "token_type_ids")
CALIBRATION = 100  # texts, of NNCF's default of 300: there are no more
WORDS = 40  # of each of them


class OpenVino(System):
    """OpenVINO's graph of an encoder.

    "bf16" is its default on processors that multiply such numbers; "int8" rounds weights and what products
    read, by calibration texts.
    """

    name = "openvino"
    packages = ("openvino", "transformers", "torch")
    classes: Mapping[str, str] = {"fp32": "fp32", "bf16": "16-bit", "int8": "8-bit"}

    def prepare(
        self, checkpoint: Path, kind: str, precision: str, out: Path, settings: Mapping[str, Any]
    ) -> None:
        import openvino
        from transformers import AutoModel, AutoTokenizer

        model = AutoModel.from_pretrained(checkpoint, attn_implementation="eager").eval()
        tokenizer = AutoTokenizer.from_pretrained(checkpoint)
        tokenizer.save_pretrained(out)
        example = dict(tokenizer(["one text", "and another one"], padding=True, return_tensors="pt"))
        graph = openvino.convert_model(model, example_input=example)
        if precision == "int8":
            import nncf

            inputs = [dict(tokenizer(text, return_tensors="np")) for text in list_calibration_texts()]
            graph = nncf.quantize(graph, nncf.Dataset(inputs), model_type=nncf.ModelType.TRANSFORMER)
        openvino.save_model(graph, out / MODEL, compress_to_fp16=False)

    def embed(self, model: Path, precision: str, threads: int, settings: Mapping[str, Any]) -> Session:
        import openvino
        from transformers import AutoTokenizer

        core = openvino.Core()
        if precision == "bf16" and "BF16" not in core.get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
            raise Skip("this processor multiplies no bf16")
        core.set_property("CPU", {"INFERENCE_NUM_THREADS": threads})
        hint = "bf16" if precision == "bf16" else "f32"
        hints = {"INFERENCE_PRECISION_HINT": hint, "PERFORMANCE_HINT": "LATENCY"}
        compiled = core.compile_model(model / MODEL, "CPU", hints)
        names = [next(name for name in INPUTS if name in spec.names) for spec in compiled.inputs]

        def states(inputs: Mapping[str, Any]) -> Any:
            return compiled([inputs[name] for name in names])[0]

        return Embedder(states, AutoTokenizer.from_pretrained(model), settings["max_length"])


def list_calibration_texts() -> list[str]:
    """Return pieces of the text that PlanForge calibrates with too."""
    root = Path(__file__).resolve().parents[2]
    words = (root / "exporter" / "calibration" / "prompts.txt").read_text(encoding="utf-8").split()
    step = max(1, len(words) // CALIBRATION)
    return [" ".join(words[begin : begin + WORDS]) for begin in range(0, len(words), step)]


SYSTEM = OpenVino()
