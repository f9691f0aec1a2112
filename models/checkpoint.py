"""Loads and saves reference models: folders in Hugging Face's layout.

Reads config.json and safetensors only. Nothing is unpickled, no code from a checkpoint is run, and no file
outside the folder is opened. Problems are ValueErrors that name the file or the tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from . import bert_names, llama_families, marian_names, modernbert_names
from .bert import Bert, BertConfig
from .bert_names import Rename
from .config_checks import check_depth
from .encoder import Encoder, EncoderConfig
from .folder import read_json, read_published_shapes
from .gpt2 import CONV1D, GPT2, MASK_BUFFERS, GPT2Config
from .language_model import LanguageModel
from .llama import Llama, LlamaConfig
from .modernbert import ModernBert, ModernBertConfig
from .refusals import refuse_adapter, refuse_kind, refuse_wrapped
from .sentence_transformers import SentenceModules, read_modules
from .transformer import Transformer, TransformerConfig
from .vocabulary import check_vocabulary
from .weights import Report, leave_out_rotary, read_weights, same_numbers

Model: TypeAlias = LanguageModel | Encoder | Transformer
Config: TypeAlias = GPT2Config | LlamaConfig | BertConfig | ModernBertConfig | TransformerConfig


@dataclass(frozen=True)
class Family:
    """How one model_type of Hugging Face maps to one of our models.

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
    """

    name: str
    model: Callable[[Any], Model]
    config: type[Any]
    prefix: str
    rename: Callable[[Mapping[str, Any]], Rename]
    converted: Callable[[str, Tensor], Tensor] = lambda name, tensor: tensor
    parts: Callable[[Any, str], Mapping[str, int]] = lambda config, name: {}
    adjust: Callable[[dict[str, Tensor], Mapping[str, Any]], None] = lambda weights, config_json: None
    tied: Callable[[Any], Mapping[str, str]] = lambda config: {}
    stand_ins: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    details: Callable[[Mapping[str, Any], Mapping[str, tuple[int, ...]]], dict[str, Any]] = lambda *_: {}
    refused: Mapping[str, object] = field(default_factory=dict)
    other_classes: Mapping[str, str | None] = field(default_factory=dict)


def gpt2_name(name: str) -> str | None:
    return None if MASK_BUFFERS.fullmatch(name) else name


def gpt2_weight(name: str, tensor: Tensor) -> Tensor:
    return tensor.T if CONV1D.fullmatch(name) else tensor


def marian_weight(name: str, tensor: Tensor) -> Tensor:
    return tensor.squeeze(0) if name == "output.bias" else tensor


def tied_head(head: str, words: str) -> Callable[[Any], Mapping[str, str]]:
    return lambda config: {head: words} if config.tie_word_embeddings else {}


def transformer_ties(config: TransformerConfig) -> dict[str, str]:
    words = "source.words.weight" if config.share_embeddings else "target.words.weight"
    shared = {"target.words.weight": words} if config.share_embeddings else {}
    return {**shared, "output.weight": words} if config.tie_word_embeddings else shared


GPT2_HEADS = (
    "GPT2DoubleHeadsModel",
    "GPT2ForQuestionAnswering",
    "GPT2ForSequenceClassification",
    "GPT2ForTokenClassification",
)
BERT = Family(
    name="bert",
    model=Bert,
    config=BertConfig,
    prefix="bert.",
    rename=lambda config_json: bert_names.rename_by(bert_names.BERT, config_json),
    tied=tied_head("heads.masked_lm.decoder.weight", "embeddings.words.weight"),
    stand_ins=bert_names.STAND_INS,
    fixed={"pooler": None, "sentence": None},
    details=bert_names.details,
    refused={"position_embedding_type": "absolute", "is_decoder": False, "add_cross_attention": False},
    other_classes={"BertForMultipleChoice": "BertModel"},
)
LLAMA_HEADS = ("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")


def make_llama(model_type: str) -> Family:
    """Return the family of one model_type of the Llama family."""
    row = llama_families.FAMILIES[model_type]
    return Family(
        name="llama",
        model=Llama,
        config=LlamaConfig,
        prefix="model.",
        rename=llama_families.rename_by,
        converted=row.convert,
        parts=row.list_parts,
        adjust=llama_families.join_projections,
        tied=tied_head("lm_head.weight", "embed_tokens.weight"),
        details=lambda config_json, shapes: llama_families.read_settings(config_json),
        other_classes={f"{row.class_name}{head}": f"{row.class_name}ForCausalLM" for head in LLAMA_HEADS},
    )


ROBERTA = replace(
    BERT,
    prefix="roberta.",
    rename=lambda config_json: bert_names.rename_by(bert_names.ROBERTA, config_json),
    adjust=bert_names.fold_segment,
    details=bert_names.read_roberta,
    other_classes={
        f"{name}ForMultipleChoice": f"{name}Model" for name in ("Roberta", "XLMRoberta", "Camembert")
    },
)
FAMILIES = {
    **dict.fromkeys(("roberta", "xlm-roberta", "camembert"), ROBERTA),
    "modernbert": Family(
        name="modernbert",
        model=ModernBert,
        config=ModernBertConfig,
        prefix="model.",
        rename=modernbert_names.rename_by,
        tied=tied_head("heads.masked_lm.decoder.weight", "words.weight"),
        details=modernbert_names.read_settings,
        other_classes={"ModernBertForMultipleChoice": "ModernBertModel"},
    ),
    **{model_type: make_llama(model_type) for model_type in llama_families.FAMILIES},
    "gpt2": Family(
        name="gpt2",
        model=GPT2,
        config=GPT2Config,
        prefix="transformer.",
        rename=lambda config_json: gpt2_name,
        converted=gpt2_weight,
        tied=tied_head("lm_head.weight", "wte.weight"),
        refused={
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "add_cross_attention": False,
        },
        other_classes=dict.fromkeys(GPT2_HEADS, "GPT2LMHeadModel"),
    ),
    "bert": BERT,
    "distilbert": replace(
        BERT,
        prefix="distilbert.",
        rename=lambda config_json: bert_names.rename_by(bert_names.DISTILBERT, config_json),
        settings={
            "dim": "hidden_size",
            "n_layers": "num_hidden_layers",
            "n_heads": "num_attention_heads",
            "hidden_dim": "intermediate_size",
            "activation": "hidden_act",
        },
        fixed={**BERT.fixed, "type_vocab_size": 0, "layer_norm_eps": 1e-12},
        refused={},
        other_classes={"DistilBertForMultipleChoice": "DistilBertModel"},
    ),
    "transformer": Family(
        name="transformer",
        model=Transformer,
        config=TransformerConfig,
        prefix="",
        rename=lambda config_json: str,
        tied=transformer_ties,
    ),
    "marian": Family(
        name="transformer",
        model=Transformer,
        config=TransformerConfig,
        prefix="model.",
        rename=lambda config_json: marian_names.rename,
        converted=marian_weight,
        stand_ins=marian_names.STAND_INS,
        tied=transformer_ties,
        details=marian_names.settings,
        refused={
            "normalize_before": False,
            "normalize_embedding": False,
            "add_final_layer_norm": False,
            "static_position_embeddings": True,
        },
        other_classes={"MarianForCausalLM": None},
    ),
}


@dataclass(frozen=True)
class Description:
    """A checkpoint folder's model, described without its weights.

    Attributes:
        family: how its published names map to ours.
        config: our config.
        config_json: the published config.
        folder: the folder of config.json and the weights.
        modules: those of a sentence-transformers folder; None for others.
    """

    family: Family
    config: Config
    config_json: Mapping[str, Any]
    folder: Path
    modules: SentenceModules | None


def describe(folder: Path) -> Description:
    """Read config.json, modules.json, and the names and shapes of the weights.

    Raises:
        ValueError: a file is missing or damaged, or sets what we don't implement; names it.
    """
    refuse_adapter(folder)
    modules = read_modules(folder)
    folder = folder if modules is None else modules.transformer
    refuse_adapter(folder)
    config_json = read_json(folder / "config.json")
    refuse_kind(folder, config_json)
    family = family_of(config_json)
    if modules is not None and not issubclass(family.config, EncoderConfig):
        raise ValueError(f"{folder}: sentence-transformers folders are of encoders here, not {family.name}")
    check_class(folder, family, bert_names.architecture(config_json))
    for name, off in family.refused.items():
        if config_json.get(name, off) != off:
            raise ValueError(f"config.json sets {name}={config_json[name]!r}; only {off!r} is supported")
    known = {f.name for f in fields(family.config)}
    named = {family.settings.get(name, name): value for name, value in config_json.items()}
    values = {name: value for name, value in named.items() if name in known}
    rename = family.rename(config_json)
    published = read_published_shapes(folder)
    refuse_wrapped(folder, published)
    shapes = {
        ours: shape
        for name, shape in published.items()
        if (ours := rename(name.removeprefix(family.prefix))) is not None
    }
    try:
        check_depth(config_json)
        values |= {**family.fixed, **family.details(config_json, shapes)}
        if modules is not None:
            values["sentence"] = modules.config
        config = family.config(**values)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{folder}: {error}") from error
    check_vocabulary(folder, config_json, config, shapes)
    return Description(family, config, config_json, folder, modules)


def family_of(config: Mapping[str, Any]) -> Family:
    """Return the family of a config.json, by its model_type."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ValueError(
            f"model_type {model_type!r} has no reference model here; known are {sorted(FAMILIES)}"
        )
    return FAMILIES[model_type]


def check_class(folder: Path, family: Family, named: str) -> None:
    """Refuse a class of transformers that has no reference model here, by its name.

    Args:
        named: what config.json calls the model's class.

    Raises:
        ValueError: says which part of the weights can be exported, and how.
    """
    if named not in family.other_classes:
        return
    part = family.other_classes[named]
    if part is None:
        raise ValueError(f"{folder}: {named} is a part of a model; only the whole model is exported")
    raise ValueError(
        f'{folder}: {named} is not exported; without its head it is a {part}, which is: python -c "from'
        f" transformers import {part} as M; M.from_pretrained('MODEL').save_pretrained('FOLDER')\", and copy"
        " the tokenizer's files"
    )


def load_model(
    folder: str | Path, *, keep_types: bool = False, report: Report = lambda done, total: None
) -> Model:
    """Load the reference model of a folder in Hugging Face's layout, in fp32 and eval mode.

    Args:
        folder: holds config.json and model.safetensors, or shards with an index; or modules.json of
            sentence-transformers, and what that lists.
        keep_types: leave weights in their published types and in their files, which are mapped. Such a model
            computes nothing, but its weights can be read one by one, and take no memory until then, but for
            those that join several of the files' weights.
        report: called with the bytes of weights that were read, and with those of all.

    Raises:
        ValueError: names the file that is missing or damaged; or, where config and weights disagree,
            every missing and every unexpected name, and both shapes of the others.
    """
    folder = Path(folder)
    description = describe(folder)
    weights = read_weights(description, keep_types, report)
    model = empty_model(description)
    for alias, original in description.family.tied(description.config).items():
        own = weights.pop(alias, None)
        if own is not None and not same_numbers(own, weights.setdefault(original, own)):
            raise ValueError(
                f"{folder}: {alias} differs from {original}, but config.json ties them;"
                " set tie_word_embeddings to false if the head is its own"
            )
    tables = {
        name: weights.pop(name) for name, _ in model.named_buffers(remove_duplicate=False) if name in weights
    }
    leave_out_rotary(folder, model, weights)
    check_names_and_shapes(folder, dict(model.named_parameters()), weights)
    model.load_state_dict(weights, assign=True, strict=False)  # compared just now, by name and shape
    model.tie_weights()
    check_tables(folder, model, tables)
    return model.eval().requires_grad_(False)


def limit_context(model: Model, length: int) -> None:
    """Compute what depends on the longest text, of up to `length` tokens."""
    if isinstance(model, Llama | ModernBert):
        model.limit_context(length)


def check_tables(folder: Path, model: Model, tables: Mapping[str, Tensor]) -> None:
    """Refuse a file whose constants are not those that the model computes itself."""
    for name, table in tables.items():
        own = model.get_buffer(name)
        # Half a unit of bfloat16 at 1: files in that type round their constants too.
        table = table.to(torch.float32)
        if own.shape != table.shape or not torch.allclose(own, table, rtol=0, atol=2.0**-9):
            raise ValueError(f"{folder}: {name} is not the table of sines and cosines that config.json means")


def empty_model(description: Description) -> Model:
    """Create the model on the meta device: its tensors have no memory and no values yet."""
    with torch.device("meta"), NoNormalValues():
        try:
            return description.family.model(description.config)
        except (TypeError, RuntimeError) as error:
            if "verflow" not in str(error):  # of one number, or of a product
                raise
            raise ValueError(f"{description.folder}: config.json has a size that no tensor has") from error


class NoNormalValues(TorchFunctionMode):
    """Leaves out `nn.init.normal_`: PyTorch imports its compiler for it, 4 s, on the meta device."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is nn.init.normal_ and kwargs:
            return kwargs["tensor"]
        return func(*args, **kwargs or {})


def check_names_and_shapes(folder: Path, wanted: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> None:
    """Refuse a checkpoint whose tensors differ from a model's parameters; list every difference at once."""
    lines = [f"  missing: {name} {tuple(t.shape)}" for name, t in wanted.items() if name not in found]
    lines += [f"  unexpected: {name} {tuple(t.shape)}" for name, t in found.items() if name not in wanted]
    lines += [
        f"  shape: {name} is {tuple(found[name].shape)}, config.json means {tuple(t.shape)}"
        for name, t in wanted.items()
        if name in found and found[name].shape != t.shape
    ]
    if lines:
        raise ValueError("\n".join([f"{folder}: config.json and the weights disagree", *lines]))
