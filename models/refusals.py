"""Checkpoints of kinds that are refused: how to recognize each, and what to do instead.

A mixture of experts, a model of more than text, and quantized weights are told by settings that only they
have, whatever their model_type, so that models of later years are told too. Neither torch nor any weight is
loaded for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from .folder import read_json

Json = Mapping[str, Any]

# How many experts each layer has. Dense models of a mixed family have 0 or 1.
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
# Mixtures that have a model here.
OWN_MIXTURES = ("mixtral", "olmoe", "qwen3_moe")
# Mixtures whose graphs by optimum-onnx 0.1 become a bundle. It has two more: deepseek_v3, whose keys and
# values have different sizes, which no cache here takes; and qwen3_moe, whose experts are matrices of their
# own there and one tensor in transformers 5, so that no weight can be compared.
MIXTURES_OF_OPTIMUM = ("gpt_oss",)
# What a model reads in addition to text, or instead of it, by settings that only such models have.
OTHER_THAN_TEXT = {
    "images": ("vision_config", "image_size", "num_channels", "vq_config", "vlm_config"),
    "sound": (
        "num_mel_bins",
        "audio_config",
        "feat_extract_norm",
        "sampling_rate",
        "input_feat_per_channel",
        "audio_encoder",
        "audio_encoder_config",
        "acoustic_tokenizer_encoder_config",
        "codec_config",
        "projector_config",
        "thinker_config",
    ),
    "proteins": ("protein_encoder_config",),
    "text and something else": ("text_config",),
    "two models in one": ("encoder", "decoder"),
}
WITH_IMAGES = ("clip",)  # model types that have a model here though they read more than text
# Files next to config.json that older tools wrote of the quantization, and what they call the method.
QUANTIZED_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq"}


@dataclass(frozen=True)
class TextPart:
    """The language model within a multimodal model, and how transformers 5 saves it on its own.

    Attributes:
        attribute: where the model has it, within its `model`.
        model_type: what it is saved as, where its positions have axes for images that text leaves alike;
            empty where its own model_type is a language model's.
    """

    attribute: str = "language_model"
    model_type: str = ""


TEXT_PARTS = {
    "gemma3": TextPart(),
    "idefics3": TextPart("text_model"),
    "internvl": TextPart(),
    "llava": TextPart(),
    "llava_next": TextPart(),
    "llava_onevision": TextPart(),
    "mistral3": TextPart(),
    "qwen2_5_vl": TextPart(model_type="qwen2"),
    "qwen2_vl": TextPart(model_type="qwen2"),
    "qwen3_vl": TextPart(model_type="qwen3"),
    "smolvlm": TextPart("text_model"),
}


def refuse_kind(folder: Path | str, config: Json, with_optimum: bool = False) -> None:
    """Refuse a checkpoint of a kind that cannot be exported.

    Args:
        folder: the checkpoint's folder, or its hub id.
        config: its config.json.
        with_optimum: whether optimum may export it; else PlanForge's own models do.

    Raises:
        ValueError: names the kind and the setting that tells it, and says what to do instead.
    """
    kind = config.get("model_type", "the model")
    is_taken = kind in OWN_MIXTURES or (with_optimum and kind in MIXTURES_OF_OPTIMUM)
    if (experts := find_experts(config)) and not is_taken:
        raise ValueError(f"{folder}: {kind} is a mixture of experts ({experts}), {explain_mixture(kind)}")
    for what, settings in () if kind in WITH_IMAGES else OTHER_THAN_TEXT.items():
        if told_by := next((name for name in settings if name in config), None):
            raise ValueError(
                f"{folder}: {kind} is a model of {what} ({told_by} in config.json), and only models of text"
                f" are exported{explain_text_part(folder, config)}"
            )


def refuse_quantized(folder: Path | str, config: Json) -> None:
    """Refuse a checkpoint whose weights others quantized: an export reads some of them as floats first."""
    if method := find_quantization(folder, config):
        raise ValueError(
            f"{folder}: the weights are quantized ({method}), and only those in fp32, fp16 or bf16 are read"
            " here: `planforge export` reads some others; else export the original model, which this one was"
            " made from, with --precision int8 or int4"
        )


# Classes of peft by what an adapter says that it is for.
PEFT_CLASSES = {
    "CAUSAL_LM": "AutoPeftModelForCausalLM",
    "FEATURE_EXTRACTION": "AutoPeftModelForFeatureExtraction",
    "QUESTION_ANS": "AutoPeftModelForQuestionAnswering",
    "SEQ_2_SEQ_LM": "AutoPeftModelForSeq2SeqLM",
    "SEQ_CLS": "AutoPeftModelForSequenceClassification",
    "TOKEN_CLS": "AutoPeftModelForTokenClassification",
}


def refuse_adapter(folder: Path) -> None:
    """Refuse an adapter, alone or next to a whole model; say how to merge it."""
    path = folder / "adapter_config.json"
    if not path.is_file():
        return
    settings = read_json(path)
    base = settings.get("base_model_name_or_path") or "its base model"
    name = PEFT_CLASSES.get(str(settings.get("task_type")), "AutoPeftModel")
    merged = f"{folder.name}-merged"
    raise ValueError(
        f"{folder} holds an adapter ({path.name}, of {base}), which is not exported by itself:"
        f" planforge export BASE --adapter {folder} merges it into its base model. Or merge it with"
        f' peft: python -c "from peft import {name} as M;'
        f" M.from_pretrained('{folder}').merge_and_unload().save_pretrained('{merged}')\"; copy the"
        f" tokenizer's files there, and export {merged}. To export the whole model next to it instead, move"
        f" {path.name} elsewhere"
    )


# What a folder has that is a part of a model of pictures, and what to do.
LORA = "pytorch_lora_weights.safetensors"
LORA_WAY = (
    "merge it: in diffusers pipeline.load_lora_weights, fuse_lora, unload_lora_weights, save_pretrained"
)
PART_WAY = "give the folder of the whole pipeline, which has model_index.json"
FILE_WAY = "write a folder of it: in diffusers StableDiffusionPipeline.from_single_file(...).save_pretrained"


def refuse_picture_parts(folder: Path) -> None:
    """Refuse a folder that has a part of a model of pictures alone, or one file of it, with the way out."""
    if (folder / "model_index.json").is_file():
        return
    if (folder / LORA).is_file():
        raise ValueError(f"{folder}: {LORA} is a LoRA, which changes another model; {LORA_WAY}")
    if kind := read_class_name(folder / "config.json"):
        raise ValueError(f"{folder}: {kind} is a part of a model of pictures; {PART_WAY}")
    files = sorted(folder.glob("*.safetensors"))
    if len(files) == 1 and not (folder / "config.json").is_file() and has_unet(files[0]):
        raise ValueError(f"{folder}: {files[0].name} is a whole model of pictures in one file; {FILE_WAY}")


# Files that are no word vectors, by the ending of their names, and what to do.
FOLDER_WAY = "give the folder that holds it, with config.json and *.safetensors"
PICKLE_WAY = "never loaded: it may run code; write *.safetensors by save_pretrained, and give their folder"
FILES = {
    ".safetensors": ("one file of a checkpoint", FOLDER_WAY),
    ".json": ("one file of a checkpoint", FOLDER_WAY),
    ".onnx": ("a graph", "`planforge import FOLDER -o BUNDLE` takes the folder that optimum wrote it to"),
    **dict.fromkeys((".pt", ".pth", ".ckpt", ".pkl"), ("a pickle of Python", PICKLE_WAY)),
}
PICKLES = (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")  # how pickles begin, by their protocols
ZIP = b"PK\x03\x04"  # how torch.save's files begin; the first file in them is NAME/data.pkl
PEEKED = 4096


def refuse_file(path: Path) -> None:
    """Refuse a regular file that is known not to be word vectors; say what to give instead."""
    what, way = FILES.get(path.suffix.lower(), ("", ""))
    if what and has_unet(path):
        what = "a whole model of pictures in one file"
        way = FILE_WAY
    with path.open("rb") as file:
        first = file.read(PEEKED)
    if not what and (first.startswith(PICKLES) or (first.startswith(ZIP) and b"data.pkl" in first)):
        what = "a pickle of Python"
        way = PICKLE_WAY
    if what:
        raise ValueError(f"{path} is {what}, no word vectors; {way}")


def read_class_name(path: Path) -> object:
    """Return the class of diffusers that a part's config.json names; None where it names none."""
    with suppress(ValueError):  # whoever reads it says what is wrong with it
        return read_json(path).get("_class_name")
    return None


def has_unet(path: Path) -> bool:
    """Tell whether a file has a UNet's weights by the names that Stable Diffusion's own code gave them."""
    with suppress(OSError, SafetensorError), safe_open(path, "np") as file:
        return any(name.startswith("model.diffusion_model.") for name in file.keys())  # noqa: SIM118
    return False


# What wrappers of a model put before the names of its weights, and who they are.
WRAPPERS = {"_orig_mod.": "torch.compile", "module.": "DataParallel or DistributedDataParallel"}


def refuse_wrapped(folder: Path, names: Iterable[str]) -> None:
    """Refuse weights that were saved from within a wrapper of the model; say how to rename them."""
    for prefix, maker in WRAPPERS.items():
        if any(name.startswith(prefix) or f".{prefix}" in name for name in names):
            raise ValueError(
                f"{folder}: names of weights have the prefix {prefix!r} of {maker}; take it off: python -c"
                f' "import glob; from safetensors.torch import load_file, save_file; save_file('
                f"{{n.replace('{prefix}', ''): t.clone() for f in glob.glob('{folder}/*.safetensors')"
                f" for n, t in load_file(f).items()}}, '{folder}/model.safetensors', {{'format': 'pt'}})\""
            )


def find_experts(config: Json) -> str:
    """Return the setting that shows a mixture of experts, such as "num_experts=8"; "" for other models.

    Where no setting says how many there are, the model's type does.
    """
    for part in list_parts(config):
        for name in EXPERTS:
            if type(part.get(name)) is int and part[name] > 1:
                return f"{name}={part[name]}"
    kind = str(config.get("model_type"))
    says_nothing = not any(name in part for part in list_parts(config) for name in EXPERTS)
    return f"model_type={kind}" if says_nothing and (kind == "mixtral" or "moe" in kind) else ""


def list_parts(config: Json) -> Iterator[Json]:
    """Yield a config.json, and those of the parts within it."""
    yield config
    for name, value in config.items():
        if name.endswith("_config") and isinstance(value, dict):
            yield from list_parts(value)


def explain_mixture(kind: object) -> str:
    if kind in MIXTURES_OF_OPTIMUM:
        return "which PlanForge has no model of; optimum may export it: planforge export --exporter optimum"
    return (
        "which is exported neither here nor through optimum; export a dense model, of one MLP in each layer"
    )


def find_quantization(folder: Path | str, config: Json) -> str:
    """Return the method of quantization of the weights, such as "gptq"; "" if there is none."""
    settings = config.get("quantization_config", config.get("compression_config"))
    if settings:
        method = settings.get("quant_method") if isinstance(settings, dict) else None
        return str(method or "quantization_config in config.json")
    return next((method for name, method in QUANTIZED_FILES.items() if Path(folder, name).is_file()), "")


def explain_text_part(folder: Path | str, config: Json) -> str:
    """Return how to save the language model within a model, if it is one of ours."""
    from .llama_families import FAMILIES  # loads torch

    part = TEXT_PARTS.get(str(config.get("model_type")))
    text = config.get("text_config")
    own_type = text.get("model_type") if isinstance(text, dict) else None
    if part is None or not (part.model_type or own_type in FAMILIES):
        return "; export a model of text alone instead"
    alone = f"{Path(folder).name}-text"
    return (
        f". Its language model can be saved alone, with transformers 5: {write_command(folder, part, alone)};"
        f" copy the tokenizer's files there, and export {alone}"
    )


def write_command(folder: Path | str, part: TextPart, alone: str) -> str:
    """Return the command that saves the language model of a folder, or of a hub id, alone."""
    config = "c = m.config.text_config"
    if part.model_type:
        config = (
            "c = m.config.text_config.to_dict(); r = c.pop('rope_parameters'); del c['model_type'];"
            f" c = T.AutoConfig.for_model('{part.model_type}', **c,"
            " rope_parameters={'rope_type': 'default', 'rope_theta': r['rope_theta']})"
        )
    return (
        'python -c "import torch, transformers as T;'
        f" m = T.AutoModelForImageTextToText.from_pretrained('{folder}'); {config};"
        " c.tie_word_embeddings = m.config.tie_word_embeddings; torch.set_default_device('meta');"
        " t = T.AutoModelForCausalLM.from_config(c);"
        f" t.model, t.lm_head = m.model.{part.attribute}, m.lm_head; t.save_pretrained('{alone}')\""
    )
