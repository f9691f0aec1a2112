"""Loads and saves reference models: folders in Hugging Face's layout.

Reads config.json and safetensors only. Nothing is unpickled, no code from a checkpoint is run, and no file
outside the folder is opened. Problems are ValueErrors that name the file or the tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .adapter_tables import add_tables, read_adapter_names
from .bert_names import architecture
from .causal_names import find_ending
from .clip import Clip
from .config_checks import check_depth
from .diffusers_folder import is_pipeline, read_pipeline
from .encoder import Encoder, EncoderConfig
from .families import FAMILIES, STABLE_DIFFUSION, Description, Family, Model
from .folder import read_json, read_published_shapes
from .language_model import LanguageModel
from .recurrent import Recurrent
from .refusals import refuse_adapter, refuse_kind, refuse_picture_parts, refuse_quantized, refuse_wrapped
from .retro import Retro
from .sentence_transformers import SentenceModules, read_modules
from .stable_diffusion import StableDiffusion
from .static_files import describe_table
from .transformer import Transformer
from .vocabulary import check_vocabulary
from .weights import Report, leave_out_rotary, read_weights, same_numbers
from .word_vectors import WordVectors

TASKS: Mapping[type[Any], str] = {
    LanguageModel: "text-generation",
    Encoder: "text-encoding",
    Transformer: "translation",
    Recurrent: "translation",
    Retro: "retrieval-generation",
    StableDiffusion: "image-generation",
    Clip: "image-text-encoding",
    WordVectors: "word-vectors",
}  # by the class of a family's models


def describe(folder: Path) -> Description:
    """Read config.json, modules.json, and the names and shapes of the weights.

    Raises:
        ValueError: a file is missing or damaged, or sets what we don't implement; names it.
    """
    refuse_adapter(folder)
    refuse_picture_parts(folder)
    if is_pipeline(folder):
        pipeline = read_pipeline(folder)
        family = STABLE_DIFFUSION
        task = choose_task(family, None)
        return Description(family, task, pipeline.config, pipeline.config_json, folder, pipeline=pipeline)
    modules = read_modules(folder)
    if modules is None:
        return describe_transformer(folder)
    return describe_sentences(modules)


def describe_sentences(modules: SentenceModules) -> Description:
    """Read what a sentence-transformers folder's modules name, also those that read queries."""
    if modules.is_static:
        config, config_json = describe_table(modules)
        family = FAMILIES["static"]
        found = Description(family, TASKS[Encoder], config, config_json, modules.transformer, modules)
    else:
        found = describe_transformer(modules.transformer, modules)
    if modules.query is None:
        return found
    query = describe_sentences(modules.query)
    documents: Any = found.config
    queries: Any = query.config
    own = documents.list_vectors()
    other = queries.list_vectors()
    if own != other and not {*own, *other} <= {"sparse_embedding", "token_weights"}:
        raise ValueError(f"{modules.query.transformer} gives queries {other}, and documents have {own}")
    return replace(found, config=replace(documents, query=queries), query=query)


def describe_transformer(folder: Path, modules: SentenceModules | None = None) -> Description:
    """Read a transformer's config.json, and the names and shapes of its weights."""
    refuse_adapter(folder)
    config_json = read_json(folder / "config.json")
    refuse_kind(folder, config_json)
    refuse_quantized(folder, config_json)
    family = family_of(config_json, reads_texts=modules is not None)
    if modules is not None and not issubclass(family.config, EncoderConfig):
        raise ValueError(
            f"{folder}: a sentence-transformers folder must have an encoder or a decoder, not {family.name}"
        )
    check_class(folder, family, architecture(config_json))
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
        others = {} if modules is None else modules.settings
        config = family.read_config(config_json, shapes, **others)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{folder}: {error}") from error
    check_vocabulary(folder, config_json, config, shapes)
    task = choose_task(family, modules)
    adapters = read_adapter_names(folder)
    return Description(family, task, config, config_json, folder, modules, adapters=adapters)


def choose_task(family: Family, modules: SentenceModules | None) -> str:
    """Return a model's task: an encoder's with modules.json, else by its class."""
    if modules is not None:
        return TASKS[Encoder]
    return next(task for model, task in TASKS.items() if issubclass(family.model, model))


def family_of(config: Mapping[str, Any], reads_texts: bool = False) -> Family:
    """Return the family of a config.json, by its model_type; of a decoder also by its class.

    `reads_texts` tells that a decoder reads whole texts, whatever its class.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ValueError(f"model_type {model_type!r} is not supported; supported are {sorted(FAMILIES)}")
    family = FAMILIES[model_type]
    if family.with_head is not None and (reads_texts or find_ending(config) is not None):
        return family.with_head
    return family


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
        f'{folder}: {named} is not exported; save it without its head, as a {part}: python -c "from'
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
    for name in description.family.unread:
        weights.pop(name, None)
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
    """Compute the values that depend on the longest text, for up to `length` tokens."""
    if isinstance(model, LanguageModel | Encoder | Transformer | Retro):
        model.limit_context(length)


def check_tables(folder: Path, model: Model, tables: Mapping[str, Tensor]) -> None:
    """Refuse a file whose constants differ from those that the model computes itself."""
    for name, table in tables.items():
        own = model.get_buffer(name)
        # Half a unit of bfloat16 at 1: files in that type round their constants too.
        table = table.to(torch.float32)
        if own.shape != table.shape or not torch.allclose(own, table, rtol=0, atol=2.0**-9):
            raise ValueError(f"{folder}: {name} differs from the sines and cosines of config.json's settings")


def empty_model(description: Description) -> Model:
    """Create the model on the meta device: its tensors have no memory and no values yet."""
    with torch.device("meta"), NoNormalValues():
        try:
            model: Model = description.family.model(description.config)
            if description.query is not None:
                model.query = empty_model(description.query)
            if description.adapters:
                model.adapters = add_tables(model, description.folder)
            return model
        except (TypeError, RuntimeError) as error:
            if "verflow" not in str(error):  # of one value, or of a product
                raise
            raise ValueError(f"{description.folder}: config.json has a size too large to load") from error


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
