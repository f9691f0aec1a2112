"""Lets optimum export checkpoints: python optimum_exports.py FOLDER [NAME ...].

Names are of folders in FOLDER, each of which becomes NAME.onnx; without any, random checkpoints come first.
For an environment of its own: transformers 4.57 and optimum-onnx.
"""

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from optimum.exporters.onnx import main_export, onnx_export_from_model
from tokenizers import processors

TOKENIZER = Path(__file__).resolve().parents[2] / "models/demos/gpt2-demo/tokenizer.json"
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
ENCODER: dict[str, Any] = {**SHAPE, "vocab_size": 2056, "pad_token_id": 2050}
SEQ2SEQ: dict[str, Any] = {
    **{"vocab_size": 2056, "d_model": 64, "pad_token_id": 2050, "bos_token_id": 2048, "eos_token_id": 2049},
}
T5: dict[str, Any] = {"d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 2050}
BART: dict[str, Any] = {
    **{"encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96},
    **{"encoder_attention_heads": 4, "decoder_attention_heads": 4, "max_position_embeddings": 256},
    **{"decoder_start_token_id": 2049, "forced_eos_token_id": None},
}
DEBERTA: dict[str, Any] = {
    **{"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 32},
    **{"norm_rel_ebd": "layer_norm", "share_att_key": True, "max_position_embeddings": 256},
}
CONFIGS = {
    "llama": transformers.LlamaConfig(**GROUPED),
    "qwen2": transformers.Qwen2Config(**GROUPED),
    "gpt_neox": transformers.GPTNeoXConfig(**SHAPE),
    "opt": transformers.OPTConfig(**OPT),
    "phi": transformers.PhiConfig(**SHAPE),
    # Its attention adds what grows with the distance, and it reads no positions.
    "bloom": transformers.BloomConfig(**BLOOM),
    # Its attention sees 16 tokens.
    "mistral": transformers.MistralConfig(**GROUPED, sliding_window=16),
    # Its positions begin behind the padding's number, 3 here.
    "roberta": transformers.RobertaConfig(**ENCODER | {"pad_token_id": 3, "type_vocab_size": 1}),
    # Its positions begin behind 1, whatever its config says of padding.
    "mpnet": transformers.MPNetConfig(**ENCODER | {"pad_token_id": 0}),
    "deberta": transformers.DebertaV2Config(**ENCODER | DEBERTA),
    "electra": transformers.ElectraConfig(**ENCODER | {"embedding_size": 32, "num_labels": 3}),
    "albert": transformers.AlbertConfig(**ENCODER, embedding_size=32),
    "t5": transformers.T5Config(**SEQ2SEQ | T5),
    "bart": transformers.BartConfig(**SEQ2SEQ | BART),
}
TASKS = {
    **dict.fromkeys(("roberta", "mpnet", "deberta"), ("feature-extraction", transformers.AutoModel)),
    "electra": ("text-classification", transformers.AutoModelForSequenceClassification),
    "albert": ("fill-mask", transformers.AutoModelForMaskedLM),
    **dict.fromkeys(("t5", "bart"), ("text2text-generation-with-past", transformers.AutoModelForSeq2SeqLM)),
}
GENERATES = ("text-generation-with-past", transformers.AutoModelForCausalLM)


def export_decoders(folder: Path, names: list[str]) -> None:
    for name in names:
        # Its faster attention leaves Gemma 2's cap out.
        how = {"attn_implementation": "eager"} if name == "gemma 2" else {}
        model = transformers.AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float32, **how)
        out = str(folder / f"{name}.onnx")
        onnx_export_from_model(model.eval(), out, task=GENERATES[0], opset=18, do_validation=False)


def export_random_checkpoints(folder: Path) -> None:
    for name, config in CONFIGS.items():
        torch.manual_seed(0)
        task, auto = TASKS.get(name, GENERATES)
        model = auto.from_config(config)
        for parameter in model.parameters():
            if parameter.dim() == 2:  # so wide that likeliest tokens differ clearly
                torch.nn.init.normal_(parameter, std=0.12)
        model.eval().save_pretrained(folder / name)
        write_tokenizer(name, folder / name)
        out = folder / f"{name}.onnx"
        opset = 14 if name == "opt" else 18
        main_export(
            str(folder / name), str(out), task=task, opset=opset, do_validation=False, local_files_only=True
        )
        write_tokenizer(name, out)


def write_tokenizer(name: str, folder: Path) -> None:
    """GPT-2's demo tokenizer; Llama's begins every text, and what is no decoder has them framed."""
    tokenizer: Any = tokenizers.Tokenizer.from_file(str(TOKENIZER))
    if name == "llama":
        begin = tokenizer.id_to_token(0)
        tokenizer.post_processor = processors.TemplateProcessing(f"{begin} $A", None, [(begin, 0)])
    if name in TASKS:
        roles = {"cls_token": "<s>", "sep_token": "</s>", "pad_token": "<pad>", "mask_token": "<mask>"}
        tokenizer.add_special_tokens(list(roles.values()))
        if name == "roberta":
            roles["pad_token"] = tokenizer.id_to_token(3)
        if name == "mpnet":
            roles["pad_token"] = tokenizer.id_to_token(1)
        frame: dict[str, Any] = {"cls": ("<s>", 2048), "sep": ("</s>", 2049)}
        if name in ("roberta", "mpnet", "bart"):
            tokenizer.post_processor = processors.RobertaProcessing(**frame, add_prefix_space=False)
        elif name == "t5":
            template = {"single": "$A </s>", "pair": "$A </s> $B </s>", "special_tokens": [frame["sep"]]}
            tokenizer.post_processor = processors.TemplateProcessing(**template)
        else:
            tokenizer.post_processor = processors.BertProcessing(**frame)
        roles |= {"bos_token": "<s>", "eos_token": "</s>"}
        roles["tokenizer_class"] = "PreTrainedTokenizerFast"
        settings: dict[str, Any] = {**roles}
        if name == "electra":  # as BERT's class has it
            settings["model_input_names"] = ["input_ids", "token_type_ids", "attention_mask"]
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer.save(str(folder / "tokenizer.json"))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    if len(sys.argv) > 2:
        export_decoders(Path(sys.argv[1]), sys.argv[2:])
    else:
        export_random_checkpoints(Path(sys.argv[1]))
