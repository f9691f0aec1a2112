"""The tokenizer classes of transformers 5, each of which cuts texts by rules of its own.

A class takes the vocabulary and the merges of a tokenizer.json. How texts are normalized, cut and framed
follows from the class and from tokenizer_config.json, whatever tokenizer.json says of it. Classes without
such rules, such as PreTrainedTokenizerFast, take all from tokenizer.json.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import Regex, decoders, normalizers, pre_tokenizers, processors

from ....runtime.errors import TokenizerError
from ....runtime.text.tokenizer import WAY_OUT, wrap_tokenizer_errors
from .read_files import read_json_object

Settings = Mapping[str, Any]  # tokenizer_config.json
Names = Mapping[str, str]  # the special tokens by role
Model = dict[str, Any]  # of a tokenizer.json
Flags = Mapping[str, bool]
Token = tuple[str, int]

SPACE = "▁"
BERT_NAMES = {"unk": "[UNK]", "sep": "[SEP]", "pad": "[PAD]", "cls": "[CLS]", "mask": "[MASK]"}
ALBERT_NAMES = {**BERT_NAMES, "bos": "[CLS]", "eos": "[SEP]", "unk": "<unk>", "pad": "<pad>"}
LLAMA_NAMES = {"bos": "<s>", "eos": "</s>", "unk": "<unk>"}
ROBERTA_NAMES = {**LLAMA_NAMES, "sep": "</s>", "cls": "<s>", "pad": "<pad>", "mask": "<mask>"}
MPNET_NAMES = {**ROBERTA_NAMES, "unk": "[UNK]"}
GEMMA_NAMES = {"bos": "<bos>", "eos": "<eos>", "unk": "<unk>", "pad": "<pad>", "mask": "<mask>"}
END = "<|endoftext|>"
CLIP_NAMES = {"bos": "<|startoftext|>", **dict.fromkeys(("eos", "unk", "pad"), END)}
GPT1_NAMES = {"unk": "<unk>"}
WORD_END = "</w>"  # of CLIP's and GPT-1's tokens that end a word
FLAGS = {
    "add_prefix_space",
    "do_lower_case",
    "keep_accents",
    "legacy",
    "strip_accents",
    "tokenize_chinese_chars",
    "trim_offsets",
}

# Qwen2Tokenizer's: single digits, a word with the sign before it, ends of lines apart from other spaces.
QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
# CLIPTokenizer's, whose words hold no white space: it is dropped.
CLIP_WORDS = r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"
# What transformers takes for model_types whose files name no class, by names without "Tokenizer".
USUAL = {
    **dict.fromkeys(("bert", "convbert", "distilbert", "electra", "megatron-bert", "mobilebert"), "Bert"),
    **dict.fromkeys(("roberta", "bart", "data2vec-text", "ibert", "longformer"), "Roberta"),
    **dict.fromkeys(("gpt2", "gpt_neo", "gptj", "codegen", "opt", "phi", "starcoder2"), "GPT2"),
    **dict.fromkeys(("qwen2", "qwen2_moe", "qwen3", "qwen3_moe"), "Qwen2"),
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text"), "Gemma"),
    **dict.fromkeys(("gpt_neox", "mpt", "olmo", "olmoe"), "GPTNeoX"),
    "albert": "Albert",
    "clip": "CLIP",
    "mpnet": "MPNet",
    "openai-gpt": "OpenAIGPT",
    "xlm-roberta": "XLMRoberta",
    "camembert": "Camembert",
}
ALWAYS_USUAL = ("qwen2",)  # whatever class their files name, unless it is one without rules
NO_CLASS = ("granite", "ministral", "mistral", "modernbert", "olmo2", "olmo3", "phi3")
RULELESS = ("PreTrained", "TokenizersBackend")  # classes that take all from tokenizer.json
# Other names of the same classes.
ALIASES = {
    **dict.fromkeys(("ConvBert", "DistilBert", "Electra", "MobileBert", "SqueezeBert"), "Bert"),
    "Bart": "Roberta",
    "CodeGen": "GPT2",
}


def read_flags(folder: Path, settings: Settings) -> Flags:
    """Return the settings that affect how classes cut texts."""
    for name in FLAGS & set(settings):
        if not isinstance(settings[name], bool):
            path = folder / "tokenizer_config.json"
            raise TokenizerError(f"{path}: {name} is {settings[name]!r}; it must be true or false")
    return {name: settings[name] for name in FLAGS & set(settings)}


def cut_bert(tokenizer: tokenizers.Tokenizer, flags: Flags) -> None:
    tokenizer.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=flags.get("tokenize_chinese_chars", True),
        strip_accents=flags.get("strip_accents", None),  # None: as lowercase
        lowercase=flags.get("do_lower_case", True),
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##")


def cut_gpt1(tokenizer: tokenizers.Tokenizer, flags: Flags) -> None:
    """Set the steps of OpenAIGPTTokenizer, which lower-cases whatever the flags say."""
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.BPEDecoder(suffix=WORD_END)


def cut_gpt2(tokenizer: tokenizers.Tokenizer, flags: Flags) -> None:
    prefix = flags.get("add_prefix_space", False)
    tokenizer.normalizer = None
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    tokenizer.decoder = decoders.ByteLevel()


def cut_gpt_neox(tokenizer: tokenizers.Tokenizer, flags: Flags) -> None:
    """Set the steps of GPTNeoXTokenizer, which drops the frame that tokenizer.json puts around texts."""
    cut_gpt2(tokenizer, flags)
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.post_processor = processors.TemplateProcessing("$A:0", "$A:0 $B:1", [])


def cut_qwen2(tokenizer: tokenizers.Tokenizer, flags: Flags) -> None:
    prefix = flags.get("add_prefix_space", False)
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN2_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()


def cut_clip(tokenizer: tokenizers.Tokenizer, flags: Flags) -> None:
    """Set the steps of CLIPTokenizer, which lower-cases whatever the flags say."""
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Lowercase()]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(CLIP_WORDS), behavior="removed", invert=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    # transformers does the last two outside of tokenizers, with Python's strip().
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.ByteLevel(),
            decoders.Replace(WORD_END, " "),
            decoders.Replace(Regex(r"\A[\s\x1c-\x1f]+|[\s\x1c-\x1f]+\z"), ""),
        ]
    )


def cut_xlm_roberta(tokenizer: tokenizers.Tokenizer, flags: Flags) -> None:
    """Set the steps that CamembertTokenizer shares; of the normalizer only SentencePiece's rules are kept."""
    rules = list_rules(tokenizer)
    tokenizer.normalizer = rules[0] if rules else None
    cut_pieces(tokenizer, flags)


def cut_albert(tokenizer: tokenizers.Tokenizer, flags: Flags) -> None:
    steps: list[Any] = [normalizers.Replace("``", '"'), normalizers.Replace("''", '"')]
    if not flags.get("keep_accents", False):
        steps += [normalizers.NFKD(), normalizers.StripAccents()]
    if flags.get("do_lower_case", True):
        steps.append(normalizers.Lowercase())
    tokenizer.normalizer = normalizers.Sequence([*steps, *list_rules(tokenizer)])
    cut_pieces(tokenizer, flags)


def list_rules(tokenizer: tokenizers.Tokenizer) -> list[Any]:
    """Return the first of a normalizer's steps that is SentencePiece's own, as transformers takes it."""
    return [part for part in list_normalizers(tokenizer) if isinstance(part, normalizers.Precompiled)][:1]


def cut_pieces(tokenizer: tokenizers.Tokenizer, flags: Flags) -> None:
    """Cut at white space, with a space before each word."""
    scheme = "always" if flags.get("add_prefix_space", True) else "never"
    words = pre_tokenizers.WhitespaceSplit()
    pieces = pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme=scheme)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, pieces])
    tokenizer.decoder = decoders.Metaspace(replacement=SPACE, prepend_scheme=scheme)


def cut_llama(tokenizer: tokenizers.Tokenizer, flags: Flags) -> None:
    prefix = flags.get("add_prefix_space", True)
    first = "always" if flags.get("legacy", False) else "first"
    tokenizer.normalizer = None
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(
        replacement=SPACE, prepend_scheme=first if prefix else "never", split=False
    )
    strip = [decoders.Strip(content=" ", left=1)] if prefix else []
    tokenizer.decoder = decoders.Sequence([*join_pieces(), *strip])


def cut_gemma(tokenizer: tokenizers.Tokenizer, flags: Flags) -> None:
    tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
    tokenizer.decoder = decoders.Sequence(join_pieces())


def join_pieces() -> list[Any]:
    return [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]


def list_normalizers(tokenizer: tokenizers.Tokenizer) -> list[Any]:
    """Return the steps of a tokenizer's normalizer."""
    own = tokenizer.normalizer
    if isinstance(own, normalizers.Sequence):
        return [own[index] for index in range(len(own))]
    return [] if own is None else [own]


def frame_bert(tokenizer: tokenizers.Tokenizer, cls: Token, sep: Token, flags: Flags) -> None:
    """Frame one text as [CLS] A [SEP], two as [CLS] A [SEP] B [SEP]."""
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{cls[0]}:0 $A:0 {sep[0]}:0",
        pair=f"{cls[0]}:0 $A:0 {sep[0]}:0 $B:1 {sep[0]}:1",
        special_tokens=[cls, sep],
    )


def frame_roberta(tokenizer: tokenizers.Tokenizer, cls: Token, sep: Token, flags: Flags) -> None:
    trim = flags.get("trim_offsets", True)
    prefix = flags.get("add_prefix_space", False)
    tokenizer.post_processor = processors.RobertaProcessing(sep, cls, trim, prefix)


def frame_xlm_roberta(tokenizer: tokenizers.Tokenizer, bos: Token, eos: Token, flags: Flags) -> None:
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[bos[0], "$A", eos[0]],
        pair=[bos[0], "$A", eos[0], eos[0], "$B", eos[0]],
        special_tokens=[bos, eos],
    )


@dataclass(frozen=True)
class Framing:
    """The special tokens that a class puts around texts, with the roles of both."""

    first: str
    last: str
    frame: Callable[[tokenizers.Tokenizer, Token, Token, Flags], None]
    is_default: bool = False  # whether what tokenizer.json says counts more


@dataclass(frozen=True)
class TokenizerClass:
    """A tokenizer class: how it makes a tokenizer of a vocabulary.

    Attributes:
        model: the type of its model.
        names: its special tokens, where no file names others.
        cut: sets how texts are normalized and cut, and how tokens are joined.
        framing: what stands around texts; None where tokenizer.json says that.
        fields: the model's own settings, by its special tokens.
        word_end: what tokens end with at a word's end.
    """

    model: str
    names: Names
    cut: Callable[[tokenizers.Tokenizer, Flags], None]
    framing: Framing | None = None
    fields: Callable[[Model, Names], Model] = lambda model, names: {}
    word_end: str = ""


def set_wordpiece(model: Model, names: Names) -> Model:
    return {"unk_token": names["unk"], "continuing_subword_prefix": "##", "max_input_chars_per_word": 100}


def set_bpe(model: Model, names: Names) -> Model:
    usual = dict.fromkeys(("unk_token", "continuing_subword_prefix", "end_of_word_suffix"))
    return usual | dict.fromkeys(("fuse_unk", "byte_fallback", "ignore_merges"), False)


def set_word_end(model: Model, names: Names) -> Model:
    suffix = {"continuing_subword_prefix": "", "end_of_word_suffix": WORD_END}
    return set_bpe(model, names) | suffix | {"unk_token": names["unk"]}


def set_llama(model: Model, names: Names) -> Model:
    return set_bpe(model, names) | {"fuse_unk": True, "byte_fallback": True}


def set_gemma(model: Model, names: Names) -> Model:
    return set_llama(model, names) | {"unk_token": names["unk"]}


def set_xlm_roberta(model: Model, names: Names) -> Model:
    return {"unk_id": 3, "byte_fallback": False}


def set_albert(model: Model, names: Names) -> Model:
    return {"unk_id": 1, "byte_fallback": False}


def set_camembert(model: Model, names: Names) -> Model:
    pieces = [piece for piece, _ in model["vocab"]]
    return {"unk_id": pieces.index(names["unk"]) if names["unk"] in pieces else 0, "byte_fallback": False}


OF_BERT = Framing("cls", "sep", frame_bert)
OF_ALBERT = Framing("cls", "sep", frame_bert, is_default=True)
OF_ROBERTA = Framing("cls", "sep", frame_roberta)
OF_CLIP = Framing("bos", "eos", frame_roberta)  # no token has a space to trim
OF_XLM_ROBERTA = Framing("bos", "eos", frame_xlm_roberta)
CLASSES = {
    "Albert": TokenizerClass("Unigram", ALBERT_NAMES, cut_albert, OF_ALBERT, set_albert),
    "Bert": TokenizerClass("WordPiece", BERT_NAMES, cut_bert, OF_BERT, set_wordpiece),
    "CLIP": TokenizerClass("BPE", CLIP_NAMES, cut_clip, OF_CLIP, set_word_end, WORD_END),
    "Camembert": TokenizerClass("Unigram", ROBERTA_NAMES, cut_xlm_roberta, OF_XLM_ROBERTA, set_camembert),
    "GPT2": TokenizerClass("BPE", dict.fromkeys(("bos", "eos", "unk"), END), cut_gpt2, None, set_bpe),
    "GPTNeoX": TokenizerClass("BPE", dict.fromkeys(("bos", "eos", "unk"), END), cut_gpt_neox, None, set_bpe),
    "Gemma": TokenizerClass("BPE", GEMMA_NAMES, cut_gemma, None, set_gemma),
    "Llama": TokenizerClass("BPE", LLAMA_NAMES, cut_llama, None, set_llama),
    "MPNet": TokenizerClass("WordPiece", MPNET_NAMES, cut_bert, OF_ROBERTA, set_wordpiece),
    "OpenAIGPT": TokenizerClass("BPE", GPT1_NAMES, cut_gpt1, None, set_word_end, WORD_END),
    "Qwen2": TokenizerClass("BPE", dict.fromkeys(("eos", "pad", "unk"), END), cut_qwen2, None, set_bpe),
    "Roberta": TokenizerClass("BPE", ROBERTA_NAMES, cut_gpt2, OF_ROBERTA, set_bpe),
    "XLMRoberta": TokenizerClass("Unigram", ROBERTA_NAMES, cut_xlm_roberta, OF_XLM_ROBERTA, set_xlm_roberta),
}


def choose_class(folder: Path, settings: Settings, data: bytes = b"") -> TokenizerClass | None:
    """Return the class that transformers takes for a folder; None for one that has no rules of its own.

    `data` is the tokenizer.json as tokenizers writes it, if there is one: its vocabulary must be of the
    class's kind.
    """
    config = read_json_object(folder / "config.json")
    model_type = str(config.get("model_type"))
    declared = settings.get("tokenizer_class") or config.get("tokenizer_class")
    if model_type in NO_CLASS:
        return None
    name = USUAL.get(model_type, "")
    if declared is not None and not (model_type in ALWAYS_USUAL and name):
        name = shorten_class(declared)
    found = CLASSES.get(ALIASES.get(name, name))
    if found is None or not data:
        return found
    written = json.loads(data)
    is_fitting = written["model"]["type"] == found.model
    # transformers reads a Llama 3, whose class is said to be Llama's, without the class.
    return None if not is_fitting or (name == "Llama" and b'"ByteLevel"' in data) else found


def find_unknown_class(folder: Path, settings: Settings) -> str | None:
    """Return the class that a folder names, if its rules may differ from all that are known here."""
    config = read_json_object(folder / "config.json")
    declared = settings.get("tokenizer_class") or config.get("tokenizer_class")
    if declared is None or str(config.get("model_type")) in (*NO_CLASS, *ALWAYS_USUAL):
        return None
    name = shorten_class(declared)
    return None if name in RULELESS or ALIASES.get(name, name) in CLASSES else str(declared)


def shorten_class(declared: object) -> str:
    """Return a class's name without "Tokenizer" and "Fast"."""
    return " ".join(str(declared).split()).removesuffix("Fast").removesuffix("Tokenizer")


def apply_class(
    tokenizer: tokenizers.Tokenizer, kind: TokenizerClass, flags: Flags, names: Names
) -> tokenizers.Tokenizer:
    """Return a tokenizer of the same vocabulary that cuts texts as the class does, without added tokens."""
    written = json.loads(tokenizer.to_str())
    written["model"] |= kind.fields(written["model"], names)
    written["added_tokens"] = []
    built: tokenizers.Tokenizer = tokenizers.Tokenizer.from_str(json.dumps(written, ensure_ascii=False))
    kind.cut(built, flags)
    return built


def apply_framing(
    tokenizer: tokenizers.Tokenizer, framing: Framing, flags: Flags, names: Names, source: Path
) -> None:
    """Put the class's special tokens around texts; an error names `source` if the vocabulary lacks them."""
    if framing.is_default and tokenizer.post_processor is not None:
        return
    first, last = (find_token(tokenizer, names[role], source) for role in (framing.first, framing.last))
    with wrap_tokenizer_errors(str(source)):
        framing.frame(tokenizer, first, last, flags)


def find_token(tokenizer: tokenizers.Tokenizer, name: str, source: Path) -> Token:
    token_id = tokenizer.token_to_id(name)
    if token_id is None:
        raise TokenizerError(f"{source} has no {name!r}, a special token that every text needs; {WAY_OUT}")
    return name, token_id
