"""Lets optimum export checkpoints: python -m tests.helpers.optimum_exports FOLDER [NAME ...].

Names are of folders in FOLDER, each of which becomes NAME.onnx; without any, random checkpoints come first.
For an environment of its own: transformers 4.57 and optimum-onnx.
"""

import sys
import warnings
from pathlib import Path

import torch
import transformers
from optimum.exporters.onnx import main_export, onnx_export_from_model

from .random_checkpoints import CONFIGS, GENERATES, TASKS, write_random_checkpoint, write_tokenizer

TRACED_ALONE = ("falcon", "gptj", "olmo", "nemotron", "mpt")
EXPORTED = [name for name in CONFIGS if name not in TRACED_ALONE]


def export_decoders(folder: Path, names: list[str]) -> None:
    for name in names:
        # Its faster attention leaves Gemma 2's cap out.
        how = {"attn_implementation": "eager"} if name == "gemma 2" else {}
        model = transformers.AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float32, **how)
        out = str(folder / f"{name}.onnx")
        onnx_export_from_model(model.eval(), out, task=GENERATES[0], opset=18, do_validation=False)


def export_random_checkpoints(folder: Path) -> None:
    for name in EXPORTED:
        write_random_checkpoint(name, folder / name)
        task = TASKS.get(name, GENERATES)[0]
        out = folder / f"{name}.onnx"
        opset = 14 if name == "opt" else 18
        main_export(
            str(folder / name), str(out), task=task, opset=opset, do_validation=False, local_files_only=True
        )
        write_tokenizer(name, out)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    if len(sys.argv) > 2:
        export_decoders(Path(sys.argv[1]), sys.argv[2:])
    else:
        export_random_checkpoints(Path(sys.argv[1]))
