"""Writes tiny random folders of each kind of retrieval model, as sentence-transformers 6 saves them.

Stanford's and PyLate's ColBERT and BGE-M3 are written as their own libraries do, which are not installed.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from sentence_transformers import CrossEncoder, MultiVectorEncoder, SentenceTransformer, SparseEncoder
from sentence_transformers.base.modules import Dense, Normalize, Router, Transformer
from sentence_transformers.cross_encoder.modules import LogitScore
from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask
from sentence_transformers.sentence_transformer.modules import Pooling, StaticEmbedding
from sentence_transformers.sparse_encoder.modules import SparseStaticEmbedding, SpladePooling
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from torch import nn

TEXT = "the cat sat a dog ran away from ! who ? yes no . , on mat saw him her they walked home and then slept"
UNUSED = ["[unused0]", "[unused1]"]
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *UNUSED, *TEXT.split(), "in", "sun", "##s", "##ing"]
SPECIAL = ("pad", "unk", "cls", "sep", "mask")
SIZE: dict[str, Any] = {
    "vocab_size": len(WORDS),
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "initializer_range": 0.3,
}
CHAT_TOKENS = ["<|pad|>", "<|im_start|>", "<|im_end|>"]
# Pieces that BPE does not cross: words, digits, signs with line ends behind them, line ends, spaces.
PIECES = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+"
# As published rerankers have it: an instruction, a query and a document, then a beginning of the answer.
CHAT_TEMPLATE = """<|im_start|>system
Answer "yes" or "no".<|im_end|>
<|im_start|>user
<Instruct>: {{ messages | selectattr("role", "eq", "system") | map(attribute="content")
    | first | default("any") }}
<Query>: {{ messages | selectattr("role", "eq", "query") | map(attribute="content") | first }}
<Document>: {{ messages | selectattr("role", "eq", "document") | map(attribute="content") | first }}<|im_end|>
<|im_start|>assistant
<think>

</think>

"""
GROUPED: dict[str, Any] = {"num_key_value_heads": 2, "head_dim": 8, "bos_token_id": 2, "eos_token_id": 3}


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer of whole words, with BERT's special tokens around texts."""
    tokenizer = Tokenizer(models.WordPiece({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    frame = processors.TemplateProcessing(
        "[CLS] $A [SEP]", "[CLS] $A [SEP] $B [SEP]", [("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.post_processor = frame
    named = {f"{name}_token": f"[{name.upper()}]" for name in SPECIAL}
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=64, **named)
    fast.save_pretrained(folder)


def write_body(folder: Path, model: Any) -> Path:
    """Write a transformer with its tokenizer."""
    model.eval().save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def bert(**settings: Any) -> Any:
    config = transformers.BertConfig(**{**SIZE, **settings})
    return transformers.BertModel(config, add_pooling_layer=False)


def masked_bert() -> Any:
    return transformers.BertForMaskedLM(transformers.BertConfig(**SIZE))


def project(width: int = 16) -> Dense:
    """Return a projection of tokens' vectors."""
    return Dense(
        32, width, bias=False, activation_function=nn.Identity(), module_input_name="token_embeddings"
    )


def save_sentences(folder: Path, body: Any, *modules: Any, **settings: Any) -> None:
    transformer = Transformer(str(write_body(folder.parent / f"{folder.name}-body", body)))
    SentenceTransformer(modules=[transformer, *modules], device="cpu", **settings).save_pretrained(
        str(folder)
    )


def write_qwen3(folder: Path) -> None:
    prompts = {"query": "the cat ", "passage": "a dog "}
    body = transformers.Qwen3Model(transformers.Qwen3Config(**SIZE, **GROUPED))
    save_sentences(folder, body, Pooling(32, pooling_mode="lasttoken"), Normalize(), prompts=prompts)


def write_mistral(folder: Path) -> None:
    body = transformers.MistralModel(transformers.MistralConfig(**SIZE, **GROUPED, sliding_window=4))
    save_sentences(folder, body, Pooling(32, pooling_mode="mean"))


def write_gemma3(folder: Path) -> None:
    layers = ["sliding_attention", "full_attention"]
    settings: dict[str, Any] = {
        "sliding_window": 6,
        "layer_types": layers,
        "use_bidirectional_attention": True,
    }
    body = transformers.Gemma3TextModel(transformers.Gemma3TextConfig(**SIZE, **GROUPED, **settings))
    dense = [Dense(a, b, bias=False, activation_function=nn.Identity()) for a, b in ((32, 64), (64, 32))]
    save_sentences(folder, body, Pooling(32, pooling_mode="mean"), *dense, Normalize())


def write_splade(folder: Path, pooling: str = "max", activation: str = "relu") -> None:
    body = write_body(folder.parent / f"{folder.name}-body", masked_bert())
    modules = [
        Transformer(str(body), transformer_task="fill-mask"),
        SpladePooling(pooling, activation_function=activation),  # type: ignore[arg-type]
    ]
    SparseEncoder(modules=modules, device="cpu").save_pretrained(str(folder))


def write_router(folder: Path) -> None:
    """Inference-free SPLADE: queries are the weights of their tokens."""
    body = write_body(folder.parent / f"{folder.name}-body", masked_bert())
    document = [
        Transformer(str(body), transformer_task="fill-mask"),
        SpladePooling("max", activation_function="log1p_relu"),
    ]
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(body)
    query: list[Any] = [SparseStaticEmbedding(tokenizer=tokenizer, weight=torch.rand(len(WORDS)))]
    router = Router.for_query_document(query_modules=query, document_modules=document)
    SparseEncoder(modules=[router], device="cpu").save_pretrained(str(folder))


def write_two_encoders(folder: Path) -> None:
    """Queries and documents have a transformer each."""
    chains = [
        [
            Transformer(str(write_body(folder.parent / f"{folder.name}-{role}", bert()))),
            Pooling(32, pooling_mode=pooling),
        ]
        for role, pooling in (("query", "cls"), ("document", "mean"))
    ]
    router = Router.for_query_document(query_modules=chains[0], document_modules=chains[1])
    SentenceTransformer(modules=[router], device="cpu").save_pretrained(str(folder))


def write_colbert(folder: Path, expansion: Any = None) -> None:
    body = write_body(folder.parent / f"{folder.name}-body", bert())
    length = None if expansion else 8
    transformer = Transformer(
        str(body),
        query_length=length,
        document_length=32,
        query_expansion=expansion,
    )
    normalize = Normalize(module_input_name="token_embeddings")
    modules = [transformer, project(), normalize, MultiVectorMask(skiplist_words=["!", ".", "["])]
    MultiVectorEncoder(modules=modules, device="cpu").save_pretrained(str(folder))


def write_stanford(folder: Path) -> None:
    write_body(folder, bert())
    weights = {f"bert.{name}": weight for name, weight in load_file(folder / "model.safetensors").items()}
    weights["linear.weight"] = 0.2 * torch.randn(16, 32)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["HF_ColBERT"]}))
    metadata = {"query_maxlen": 12, "doc_maxlen": 20, "mask_punctuation": True}
    (folder / "artifact.metadata").write_text(json.dumps(metadata))


def write_pylate(folder: Path) -> None:
    write_body(folder, bert())
    (folder / "1_Dense").mkdir()
    weights = {"linear.weight": 0.2 * torch.randn(16, 32)}
    save_file(weights, folder / "1_Dense" / "model.safetensors", {"format": "pt"})
    dense = {"in_features": 32, "out_features": 16, "bias": False}
    dense["activation_function"] = "torch.nn.modules.linear.Identity"  # type: ignore[assignment]
    (folder / "1_Dense" / "config.json").write_text(json.dumps(dense))
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Dense", "type": "pylate.models.Dense.Dense"},
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 31}))
    settings = {
        "model_type": "ColBERT",
        "similarity_fn_name": "MaxSim",
        "query_prefix": "[unused0]",
        "document_prefix": "[unused1]",
        "query_length": 12,
        "document_length": 20,
        "attend_to_expansion_tokens": True,
        "skiplist_words": ["!", "."],
    }
    (folder / "config_sentence_transformers.json").write_text(json.dumps(settings))


def write_static(folder: Path, width: int = 32) -> None:
    tokens = write_body(folder.parent / f"{folder.name}-tokens", bert())
    table = np.random.RandomState(0).randn(len(WORDS), width).astype(np.float32)
    tokenizer = Tokenizer.from_file(str(tokens / "tokenizer.json"))
    module = StaticEmbedding(tokenizer, embedding_weights=table)
    SentenceTransformer(modules=[module, Normalize()], device="cpu").save_pretrained(str(folder))


def write_model2vec(folder: Path) -> None:
    """Write a table of fewer rows than tokens, with the row and the weight of each."""
    write_static(folder)
    generator = torch.Generator().manual_seed(1)
    weights = {
        "embeddings": torch.randn(7, 32, generator=generator),
        "mapping": torch.randint(0, 7, (len(WORDS),), generator=generator),
        "weights": torch.rand(len(WORDS), generator=generator),
    }
    path = next(folder.rglob("model.safetensors"))
    save_file(weights, path, {"format": "pt"})


def write_logit_reranker(folder: Path, family: str = "Qwen3", **settings: Any) -> None:
    config = getattr(transformers, f"{family}Config")(**SIZE, **GROUPED, **settings)
    body = write_body(
        folder.parent / f"{folder.name}-body", getattr(transformers, f"{family}ForCausalLM")(config)
    )
    score = LogitScore(WORDS.index("yes"), WORDS.index("no"))
    transformer = Transformer(str(body), transformer_task="text-generation")
    CrossEncoder(modules=[transformer, score], device="cpu").save_pretrained(str(folder))


def make_chat_tokenizer(**settings: Any) -> Any:
    """Return a byte-level BPE of few merges, some of which join signs with line ends."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=CHAT_TOKENS, initial_alphabet=alphabet, show_progress=False
    )
    lines = [TEXT, "yes no", "it ended.\nso did he!\n"] * 10
    tokenizer.train_from_iterator([CHAT_TEMPLATE, *lines], trainer)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<|pad|>", eos_token="<|im_end|>", **settings
    )


def write_chat_reranker(
    folder: Path,
    template: str | dict[str, str] = CHAT_TEMPLATE,
    task: Any = "text-generation",
    max_length: int = 160,
    padding_side: str = "right",
    options: dict[str, Any] | None = None,
    **settings: Any,
) -> None:
    """Write a reranker whose pairs are written by a chat template; settings are CrossEncoder's."""
    tokenizer = make_chat_tokenizer(model_max_length=max_length, padding_side=padding_side)
    tokenizer.chat_template = template
    yes, no = (tokenizer.encode(word)[0] for word in ("yes", "no"))
    sizes = {**SIZE, "vocab_size": len(tokenizer), "max_position_embeddings": 256, "num_labels": 1}
    kinds = {"text-generation": "CausalLM", "sequence-classification": "SequenceClassification"}
    model = getattr(transformers, f"Qwen3For{kinds[task]}")(transformers.Qwen3Config(**sizes, **GROUPED))
    body = folder.parent / f"{folder.name}-body"
    model.eval().save_pretrained(body)
    tokenizer.save_pretrained(body)
    modules: list[Any] = [
        Transformer(
            str(body),
            transformer_task=task,
            processing_kwargs={"chat_template": options} if options else None,
        )
    ]
    if task == "text-generation":
        modules.append(LogitScore(yes, no))
    CrossEncoder(modules=modules, device="cpu", **settings).save_pretrained(str(folder))


def write_pooled_reranker(folder: Path, family: str = "Bert") -> None:
    """Write a reranker whose scores are of a pooled pair, by layers of their own."""
    settings = SIZE if family == "Bert" else {**SIZE, **GROUPED}
    model = getattr(transformers, f"{family}Model")(getattr(transformers, f"{family}Config")(**settings))
    body = write_body(folder.parent / f"{folder.name}-body", model)
    modules = [
        Transformer(str(body)),
        Pooling(32, pooling_mode="mean" if family == "Bert" else "lasttoken"),
        Dense(32, 24),
        Dense(24, 1, activation_function=nn.Identity(), module_output_name="scores"),
    ]
    CrossEncoder(modules=modules, device="cpu").save_pretrained(str(folder))


def write_bge_m3(folder: Path) -> None:
    body = transformers.XLMRobertaModel(transformers.XLMRobertaConfig(**SIZE), add_pooling_layer=False)
    save_sentences(folder, body, Pooling(32, pooling_mode="cls"), Normalize())
    for name, width in (("sparse_linear", 1), ("colbert_linear", 16)):
        layer = nn.Linear(32, width)
        save_file(dict(layer.state_dict()), folder / f"{name}.safetensors", {"format": "pt"})


WRITERS: dict[str, Callable[[Path], None]] = {
    "qwen3": write_qwen3,
    "mistral": write_mistral,
    "gemma3": write_gemma3,
    "splade": write_splade,
    "router": write_router,
    "two-encoders": write_two_encoders,
    "colbert": write_colbert,
    "stanford": write_stanford,
    "pylate": write_pylate,
    "static": write_static,
    "model2vec": write_model2vec,
    "logit-reranker": write_logit_reranker,
    "chat-reranker": write_chat_reranker,
    "bge-m3": write_bge_m3,
}


def write_folder(kind: str, folder: Path) -> Path:
    """Write the folder of a kind, always with the same weights; only the folder itself is left."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(sum(map(ord, kind)))
    WRITERS[kind](folder)
    return folder
