"""Lets optimum export decoders: python optimum_exports.py FOLDER NAME ..., each as FOLDER/NAME.onnx.

For an environment of its own, as `imported_checkpoints.py`.
"""

import sys
import warnings
from pathlib import Path

import torch
import transformers
from optimum.exporters.onnx import onnx_export_from_model


def main(folder: Path, names: list[str]) -> None:
    warnings.simplefilter("ignore")
    for name in names:
        # Its faster attention leaves Gemma 2's cap out.
        how = {"attn_implementation": "eager"} if name == "gemma 2" else {}
        model = transformers.AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float32, **how)
        task = "text-generation-with-past"
        out = folder / f"{name}.onnx"
        onnx_export_from_model(model.eval(), str(out), task=task, opset=18, do_validation=False)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
