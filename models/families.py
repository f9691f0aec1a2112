"""The table of Hugging Face's model_types and our models for them, one row each.

Names of weights and settings of one family are in a file of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeAlias

from torch import Tensor

from .bert import Bert, BertConfig
from .bert_names import BERT as BERT_NAMES
from .bert_names import DISTILBERT as DISTILBERT_NAMES
from .bert_names import ROBERTA as ROBERTA_NAMES
from .bert_names import STAND_INS as BERT_STAND_INS
from .bert_names import Rename, fold_segment, read_roberta
from .bert_names import details as read_bert
from .bert_names import rename_by as rename_bert
from .causal_encoder import CausalEncoderConfig
from .causal_names import make_family_with_head
from .clip import Clip, ClipConfig
from .clip_names import read_clip, rename_clip, rename_stable_diffusion
from .diffusers_folder import Pipeline
from .encoder import Encoder
from .gpt2 import GPT2, GPT2Config
from .gpt2_names import (
    RELATIVES,
    gpt2_weight,
    join_qkv,
    read_gpt1,
    read_gpt_neo,
    rename_gpt2,
    rename_gpt_neo,
)
from .language_model import LanguageModel
from .llama import Llama, LlamaConfig
from .llama_families import FAMILIES as LLAMA_FAMILIES
from .llama_families import join_projections
from .llama_families import read_settings as read_llama
from .llama_families import rename_by as rename_llama
from .marian_names import STAND_INS as MARIAN_STAND_INS
from .marian_names import rename as rename_marian
from .marian_names import settings as read_marian
from .modernbert import ModernBert, ModernBertConfig
from .modernbert_names import read_settings as read_modernbert
from .modernbert_names import rename_by as rename_modernbert
from .recurrent import Recurrent, RecurrentConfig
from .retro import Retro
from .retro_config import RetroConfig
from .sentence_transformers import SentenceModules
from .stable_diffusion import StableDiffusion, StableDiffusionConfig
from .static import StaticConfig, StaticEncoder
from .transformer import Transformer, TransformerConfig
from .word_vectors import WordVectors, WordVectorsConfig

Model: TypeAlias = (
    LanguageModel | Encoder | Transformer | Recurrent | Retro | StableDiffusion | Clip | WordVectors
)
Config: TypeAlias = (
    GPT2Config
    | CausalEncoderConfig
    | LlamaConfig
    | BertConfig
    | ModernBertConfig
    | StaticConfig
    | TransformerConfig
    | RecurrentConfig
    | RetroConfig
    | StableDiffusionConfig
    | ClipConfig
    | WordVectorsConfig
)


def leave_weight(name: str, tensor: Tensor) -> Tensor:
    return tensor


@dataclass(frozen=True)
class Family:
    """A model_type of Hugging Face, and the way it maps to one of our models.

    Attributes:
        prefix: the prefix that published names may have.
        rename: returns the renaming of weights for a config.json.
        converted: converts a published weight to ours, where it is published in another shape.
        parts: returns for one of our names the weights that it holds, one below the other, each with its
            rows; nothing for a single weight.
        adjust: changes weights that have our names, where several make up one of ours.
        tied: our names of tied weights, each with the weight that it shares, as the config says.
        stand_ins: our names of weights that replace another where that one is missing.
        settings: published names of settings that have another name in our config.
        fixed: settings that config.json does not have.
        details: settings that follow from names and shapes of the weights alone.
        refused: settings that we don't implement, each with the value that means "off".
        other_classes: classes of transformers that we don't implement, each with the one whose part of the
            weights can be exported; None where there is none.
        unread: our names of weights that the model does without.
        with_head: of decoders the family of those that have a head, and read whole texts.
    """

    name: str
    model: type[Any]  # a `Model`
    config: type[Any]
    prefix: str
    rename: Callable[[Mapping[str, Any]], Rename]
    converted: Callable[[str, Tensor], Tensor] = leave_weight
    parts: Callable[[Any, str], Mapping[str, int]] = lambda config, name: {}
    adjust: Callable[[dict[str, Tensor], Mapping[str, Any]], None] = lambda weights, config_json: None
    tied: Callable[[Any], Mapping[str, str]] = lambda config: {}
    stand_ins: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    details: Callable[[Mapping[str, Any], Mapping[str, tuple[int, ...]]], dict[str, Any]] = lambda *_: {}
    refused: Mapping[str, object] = field(default_factory=dict)
    other_classes: Mapping[str, str | None] = field(default_factory=dict)
    unread: tuple[str, ...] = ()
    with_head: Family | None = None

    def read_config(
        self,
        config_json: Mapping[str, Any],
        shapes: Mapping[str, tuple[int, ...]],
        **others: Any,
    ) -> Any:
        """Return our config of a config.json and the weights' shapes; `others` are settings besides.

        Raises:
            ValueError: a value that we don't implement; names it.
        """
        for name, off in self.refused.items():
            if config_json.get(name, off) != off:
                raise ValueError(f"config.json sets {name}={config_json[name]!r}; only {off!r} is supported")
        known = {f.name for f in fields(self.config)}
        named = {self.settings.get(name, name): value for name, value in config_json.items()}
        values = {name: value for name, value in named.items() if name in known}
        values |= {**self.fixed, **self.details(config_json, shapes), **others}
        return self.config(**values)


def marian_weight(name: str, tensor: Tensor) -> Tensor:
    return tensor.squeeze(0) if name == "output.bias" else tensor


def tied_head(head: str, words: str) -> Callable[[Any], Mapping[str, str]]:
    return lambda config: {head: words} if config.tie_word_embeddings else {}


def transformer_ties(config: TransformerConfig) -> dict[str, str]:
    words = "source.words.weight" if config.share_embeddings else "target.words.weight"
    shared = {"target.words.weight": words} if config.share_embeddings else {}
    return {**shared, "output.weight": words} if config.tie_word_embeddings else shared


GPT2_FAMILY = Family(
    name="gpt2",
    model=GPT2,
    config=GPT2Config,
    prefix="transformer.",
    rename=lambda config_json: rename_gpt2,
    converted=gpt2_weight,
    tied=tied_head("lm_head.weight", "wte.weight"),
    fixed=RELATIVES,
    refused={
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
    },
)
BERT = Family(
    name="bert",
    model=Bert,
    config=BertConfig,
    prefix="bert.",
    rename=lambda config_json: rename_bert(BERT_NAMES, config_json),
    tied=tied_head("heads.masked_lm.decoder.weight", "embeddings.words.weight"),
    stand_ins=BERT_STAND_INS,
    fixed={"pooler": None, "sentence": None},
    details=read_bert,
    refused={"position_embedding_type": "absolute", "is_decoder": False, "add_cross_attention": False},
)


def add_heads(family: Family) -> Family:
    """Return a decoder's family with that of its classes that have a head."""
    return replace(family, with_head=make_family_with_head(family))


def make_llama(model_type: str) -> Family:
    """Return the family of one model_type of the Llama family."""
    row = LLAMA_FAMILIES[model_type]
    family = Family(
        name="llama",
        model=Llama,
        config=LlamaConfig,
        prefix="model.",
        rename=rename_llama,
        converted=row.convert,
        parts=row.list_parts,
        adjust=join_projections,
        tied=tied_head("lm_head.weight", "embed_tokens.weight"),
        details=lambda config_json, shapes: read_llama(config_json),
    )
    return add_heads(family)


ROBERTA = replace(
    BERT,
    prefix="roberta.",
    rename=lambda config_json: rename_bert(ROBERTA_NAMES, config_json),
    adjust=fold_segment,
    details=read_roberta,
)
FAMILIES = {
    **dict.fromkeys(("roberta", "xlm-roberta", "camembert"), ROBERTA),
    "modernbert": Family(
        name="modernbert",
        model=ModernBert,
        config=ModernBertConfig,
        prefix="model.",
        rename=rename_modernbert,
        tied=tied_head("heads.masked_lm.decoder.weight", "words.weight"),
        details=read_modernbert,
    ),
    **{model_type: make_llama(model_type) for model_type in LLAMA_FAMILIES},
    "gpt2": add_heads(GPT2_FAMILY),
    "openai-gpt": add_heads(replace(GPT2_FAMILY, details=read_gpt1)),
    "gpt_neo": add_heads(
        replace(
            GPT2_FAMILY,
            rename=lambda config_json: rename_gpt_neo,
            converted=leave_weight,
            adjust=join_qkv,
            settings={
                "hidden_size": "n_embd",
                "intermediate_size": "n_inner",
                "max_position_embeddings": "n_positions",
                "num_heads": "n_head",
                "num_layers": "n_layer",
            },
            details=read_gpt_neo,
        )
    ),
    "bert": BERT,
    "distilbert": replace(
        BERT,
        prefix="distilbert.",
        rename=lambda config_json: rename_bert(DISTILBERT_NAMES, config_json),
        settings={
            "dim": "hidden_size",
            "n_layers": "num_hidden_layers",
            "n_heads": "num_attention_heads",
            "hidden_dim": "intermediate_size",
            "activation": "hidden_act",
        },
        fixed={**BERT.fixed, "type_vocab_size": 0, "layer_norm_eps": 1e-12},
        refused={},
    ),
    "transformer": Family(
        name="transformer",
        model=Transformer,
        config=TransformerConfig,
        prefix="",
        rename=lambda config_json: str,
        tied=transformer_ties,
    ),
    "recurrent": Family(
        name="recurrent",
        model=Recurrent,
        config=RecurrentConfig,
        prefix="",
        rename=lambda config_json: str,
    ),
    "retro": Family(
        name="retro",
        model=Retro,
        config=RetroConfig,
        prefix="",
        rename=lambda config_json: str,
        tied=tied_head("output.weight", "words.weight"),
    ),
    "marian": Family(
        name="transformer",
        model=Transformer,
        config=TransformerConfig,
        prefix="model.",
        rename=lambda config_json: rename_marian,
        converted=marian_weight,
        stand_ins=MARIAN_STAND_INS,
        tied=transformer_ties,
        details=read_marian,
        refused={
            "normalize_before": False,
            "normalize_embedding": False,
            "add_final_layer_norm": False,
            "static_position_embeddings": True,
        },
        other_classes={"MarianForCausalLM": None},
    ),
    "clip": Family(
        name="clip",
        model=Clip,
        config=ClipConfig,
        prefix="",
        rename=lambda config_json: rename_clip,
        details=lambda config_json, shapes: read_clip(config_json),
        other_classes={"CLIPForImageClassification": None},
    ),
    "static": Family(
        name="static",
        model=StaticEncoder,
        config=StaticConfig,
        prefix="",
        rename=lambda config_json: str,
    ),
    "word-vectors": Family(
        name="word-vectors",
        model=WordVectors,
        config=WordVectorsConfig,
        prefix="",
        rename=lambda config_json: str,
        tied=lambda config: {"scores.weight": "directions.weight"},
    ),
}
# Of a diffusers folder, which has no model_type.
STABLE_DIFFUSION = Family(
    name="stable-diffusion",
    model=StableDiffusion,
    config=StableDiffusionConfig,
    prefix="",
    rename=lambda config_json: rename_stable_diffusion,
)


@dataclass(frozen=True)
class Description:
    """A checkpoint folder's model, described without its weights.

    Attributes:
        family: how its published names map to ours.
        task: "text-generation", "retrieval-generation", "text-encoding", "translation", "image-generation",
            "image-text-encoding" or "word-vectors".
        config: our config.
        config_json: the published config.
        folder: the folder of config.json and the weights.
        modules: those of a sentence-transformers folder; None for others.
        pipeline: the parts of a diffusers folder; None for others.
        query: the encoder that reads queries, where there is another than for documents.
        adapters: the names of those that stay beside the model; see `adapter_tables`.
    """

    family: Family
    task: str
    config: Config
    config_json: Mapping[str, Any]
    folder: Path
    modules: SentenceModules | None = None
    pipeline: Pipeline | None = None
    query: Description | None = None
    adapters: tuple[str, ...] = ()

    @property
    def weight_folders(self) -> Mapping[str, Path]:
        """Return the folders of the weights, by what stands before their names in `Family.rename`."""
        if self.pipeline is None:
            return {"": self.folder}
        return {f"{part}.": folder for part, folder in self.pipeline.folders.items()}
