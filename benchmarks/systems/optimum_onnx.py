"""optimum-onnx: its ONNX export, run by its own classes or, for encoders, by ONNX Runtime alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .system import Session, System
from .transformers import Embedder, Generator, Translator

TASKS = {
    "generate": "text-generation-with-past",
    "embed": "feature-extraction",
    "translate": "text2text-generation-with-past",
}


class OptimumOnnx(System):
    """optimum-onnx; with torch_threads its search, which is torch's, has other threads than the graphs.

    "int8" of an encoder is ONNX Runtime's quantize_dynamic, per channel.
    """

    name = "optimum-onnx"
    packages: tuple[str, ...] = ("optimum-onnx", "onnxruntime", "transformers", "torch")
    classes: Mapping[str, str] = {"fp32": "fp32", "int8": "8-bit"}
    differences: Mapping[str, str] = {
        "prefill_logit_rows": "its graph computes the logits of every token of the prompt"
    }

    def gathered_tables(self, precision: str) -> int:
        return 1

    def prepare(
        self, checkpoint: Path, kind: str, precision: str, out: Path, settings: Mapping[str, Any]
    ) -> None:
        from optimum.exporters.onnx import main_export

        main_export(str(checkpoint), out, task=TASKS[kind], do_validation=False)
        if precision == "int8":
            from onnxruntime.quantization import QuantType, quantize_dynamic

            fp32 = out / "model.onnx"
            quantize_dynamic(fp32, out / "int8.onnx", per_channel=True, weight_type=QuantType.QInt8)
            (out / "int8.onnx").replace(fp32)

    def generate(self, model: Path, precision: str, threads: int, settings: Mapping[str, Any]) -> Session:
        from optimum.onnxruntime import ORTModelForCausalLM

        return Generator(load_model(ORTModelForCausalLM, model, threads, settings))

    def embed(self, model: Path, precision: str, threads: int, settings: Mapping[str, Any]) -> Session:
        import onnxruntime
        from transformers import AutoTokenizer

        session = onnxruntime.InferenceSession(model / "model.onnx", session_options(threads))
        names = [spec.name for spec in session.get_inputs()]

        def states(inputs: Mapping[str, Any]) -> Any:
            return session.run(["last_hidden_state"], {name: inputs[name] for name in names})[0]

        return Embedder(states, AutoTokenizer.from_pretrained(model), settings["max_length"])

    def translate(self, model: Path, precision: str, threads: int, settings: Mapping[str, Any]) -> Session:
        from optimum.onnxruntime import ORTModelForSeq2SeqLM

        return Translator(load_model(ORTModelForSeq2SeqLM, model, threads, settings))


def load_model(kind: Any, model: Path, threads: int, settings: Mapping[str, Any]) -> Any:
    import torch

    torch.set_num_threads(settings.get("torch_threads", threads))
    return kind.from_pretrained(model, use_cache=True, session_options=session_options(threads))


def session_options(threads: int) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    return options


SYSTEM = OptimumOnnx()
