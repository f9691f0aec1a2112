"""Writes random checkpoints and lets optimum export them: python imported_checkpoints.py FOLDER.

For an environment of its own: transformers 4.57 and optimum-onnx.
"""

import shutil
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from optimum.exporters.onnx import main_export

TOKENIZER = Path(__file__).resolve().parents[1] / "models/demos/gpt2-demo/tokenizer.json"
SHAPE: dict[str, Any] = {
    **{"vocab_size": 2048, "hidden_size": 64, "intermediate_size": 96, "max_position_embeddings": 256},
    **{"num_hidden_layers": 2, "num_attention_heads": 4, "bos_token_id": 0, "eos_token_id": 0},
}
GROUPED: dict[str, Any] = {**SHAPE, "num_key_value_heads": 2}
OPT: dict[str, Any] = {"word_embed_proj_dim": 64, "ffn_dim": 96, "pad_token_id": 0, **SHAPE}
BLOOM: dict[str, Any] = {
    **{"vocab_size": 2048, "hidden_size": 64, "n_layer": 2, "n_head": 4, "seq_length": 256},
    **{"bos_token_id": 0, "eos_token_id": 0},
}
CONFIGS = {
    "llama": transformers.LlamaConfig(**GROUPED),
    "qwen2": transformers.Qwen2Config(**GROUPED),
    "gpt_neox": transformers.GPTNeoXConfig(**SHAPE),
    "opt": transformers.OPTConfig(**OPT),
    "phi": transformers.PhiConfig(**SHAPE),
    # Its attention adds what grows with the distance, and it reads no positions.
    "bloom": transformers.BloomConfig(**BLOOM),
    # Its attention sees 16 tokens, which ONNX Runtime's over shared buffers is not told.
    "mistral": transformers.MistralConfig(**GROUPED, sliding_window=16),
}


def main(folder: Path) -> None:
    warnings.simplefilter("ignore")
    for name, config in CONFIGS.items():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config)
        for parameter in model.parameters():
            if parameter.dim() == 2:  # so wide that likeliest tokens differ clearly
                torch.nn.init.normal_(parameter, std=0.12)
        model.eval().save_pretrained(folder / name)
        shutil.copy(TOKENIZER, folder / name)
        out = folder / f"{name}.onnx"
        task = "text-generation-with-past"
        main_export(str(folder / name), str(out), task=task, do_validation=False, local_files_only=True)
        shutil.copy(TOKENIZER, out)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
