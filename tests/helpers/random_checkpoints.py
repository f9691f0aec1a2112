"""Random checkpoints of what PlanForge has no model of: read in optimum's environment too, which is older."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
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
FALCON: dict[str, Any] = {k: v for k, v in SHAPE.items() if k != "intermediate_size"}
GPTJ: dict[str, Any] = {
    **{"vocab_size": 2048, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256, "rotary_dim": 8},
    **{"n_inner": 96, "bos_token_id": 0, "eos_token_id": 0},
}
MPT: dict[str, Any] = {
    **{"vocab_size": 2048, "d_model": 64, "n_layers": 2, "n_heads": 4, "max_seq_len": 256},
    **{"expansion_ratio": 2, "bos_token_id": 0, "eos_token_id": 0},
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
    "falcon": transformers.FalconConfig(**FALCON),
    "gptj": transformers.GPTJConfig(**GPTJ),
    # Its norms have no weights; these scale by 1 + weight; this one's length has a name of its own.
    "olmo": transformers.OlmoConfig(**GROUPED),
    "nemotron": transformers.NemotronConfig(**GROUPED, head_dim=16),
    "mpt": transformers.MptConfig(**MPT),
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


def write_random_checkpoint(name: str, folder: Path) -> None:
    """Write a checkpoint of CONFIGS with its tokenizer; likeliest tokens differ clearly."""
    torch.manual_seed(0)
    model = TASKS.get(name, GENERATES)[1].from_config(CONFIGS[name])
    for parameter in model.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.12)
    model.eval().save_pretrained(folder)
    write_tokenizer(name, folder)


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
        frame = (("</s>", 2049), ("<s>", 2048))
        if name in ("roberta", "mpnet", "bart"):
            tokenizer.post_processor = processors.RobertaProcessing(*frame, True, False)
        elif name == "t5":
            template = {"single": "$A </s>", "pair": "$A </s> $B </s>", "special_tokens": [frame[0]]}
            tokenizer.post_processor = processors.TemplateProcessing(**template)
        else:
            tokenizer.post_processor = processors.BertProcessing(*frame)
        roles |= {"bos_token": "<s>", "eos_token": "</s>"}
        roles["tokenizer_class"] = "PreTrainedTokenizerFast"
        settings: dict[str, Any] = {**roles}
        if name == "electra":  # as BERT's class has it
            settings["model_input_names"] = ["input_ids", "token_type_ids", "attention_mask"]
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer.save(str(folder / "tokenizer.json"))
