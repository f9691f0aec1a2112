"""Makes tokenizer.json of the vocabulary of a GGUF file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from .gguf_file import GgufFile

UNKNOWN = 2  # kinds of tokens
CONTROL = 3
USER_DEFINED = 4
SPACE = "▁"
# How texts are cut into words, by `tokenizer.ggml.pre`.
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
# Whose words are tokens wherever the vocabulary has them, and whose texts begin with a token.
WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3")
WORDS = {
    **dict.fromkeys(("gpt-2", "mpt", "olmo", "jais", "phi-2"), GPT2),
    **dict.fromkeys((*WHOLE_WORDS, "smaug-bpe"), LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), QWEN2),
}
COMPOSED = ("qwen2", "deepseek-r1-qwen")  # whose texts are normalized by NFC first


def make_tokenizer(file: GgufFile) -> Tokenizer:
    """Return the tokenizer of a file.

    Raises:
        ValueError: a kind of vocabulary, or of cutting texts into words, that is not read; names it.
    """
    tokens = [str(token) for token in file.settings["tokenizer.ggml.tokens"]]
    kind = file.settings.get("tokenizer.ggml.model")
    if kind == "gpt2":
        made = make_byte_level(file, tokens)
    elif kind == "llama":
        made = make_sentence_pieces(file, tokens)
    else:
        raise ValueError(f"{file.path} has a vocabulary of the kind {kind!r}, and gpt2 and llama are read")
    kinds = file.settings.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    for index, (token, own) in enumerate(zip(tokens, kinds, strict=False)):
        is_special = own == CONTROL or (own == UNKNOWN and kind == "llama")
        if (is_special or own == USER_DEFINED) and made.token_to_id(token) == index:
            made.add_tokens([AddedToken(token, special=is_special, normalized=False)])
    add_frame(made, file, tokens)
    return made


def make_byte_level(file: GgufFile, tokens: Sequence[str]) -> Tokenizer:
    """Return a tokenizer of bytes, as GPT-2's, Llama 3's and Qwen's are."""
    words = str(file.settings.get("tokenizer.ggml.pre", "default"))
    if words not in WORDS:
        raise ValueError(
            f"{file.path} cuts texts into words as {words!r} (tokenizer.ggml.pre), and"
            f" {', '.join(sorted(WORDS))} are read; give the original model"
        )
    written = [str(merge).partition(" ") for merge in file.settings.get("tokenizer.ggml.merges") or ()]
    merges = [(first, second) for first, _, second in written]
    made: Any = Tokenizer(models.BPE(index(tokens), merges, ignore_merges=words in WHOLE_WORDS))
    if words in COMPOSED:
        made.normalizer = normalizers.NFC()
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS[words]), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    found: Tokenizer = made
    return found


def make_sentence_pieces(file: GgufFile, tokens: Sequence[str]) -> Tokenizer:
    """Return a tokenizer of SentencePiece's BPE, whose merges follow from the scores of its pieces."""
    scores = file.settings.get("tokenizer.ggml.scores") or [0.0] * len(tokens)
    vocabulary = index(tokens)
    unknown = file.settings.get("tokenizer.ggml.unknown_token_id", 0)
    made: Any = Tokenizer(
        models.BPE(
            vocabulary,
            list_merges(vocabulary, scores),
            unk_token=tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefixes = file.settings.get("tokenizer.ggml.add_space_prefix", True)
    replace = normalizers.Replace(" ", SPACE)
    made.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), replace]) if prefixes else replace
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefixes else steps)
    found: Tokenizer = made
    return found


def index(tokens: Sequence[str]) -> dict[str, int]:
    """Return the ids of tokens; of equal ones the first."""
    found: dict[str, int] = {}
    for number, token in enumerate(tokens):
        found.setdefault(token, number)
    return found


def list_merges(vocabulary: dict[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Return the pairs that pieces are made of, those of the best piece first."""
    found = []
    for piece, number in vocabulary.items():
        pairs = [(piece[:at], piece[at:]) for at in range(1, len(piece))]
        known = [pair for pair in pairs if pair[0] in vocabulary and pair[1] in vocabulary]
        known.sort(key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
        found += [(-scores[number], pair) for pair in known]
    found.sort(key=lambda one: one[0])
    return [pair for _, pair in found]


def add_frame(made: Any, file: GgufFile, tokens: Sequence[str]) -> None:
    """Let texts begin and end with the tokens that the file says."""
    settings = file.settings
    kinds = {settings.get("tokenizer.ggml.model"), settings.get("tokenizer.ggml.pre")}
    usual = not kinds.isdisjoint(("llama", *WHOLE_WORDS))
    begins = settings.get("tokenizer.ggml.add_bos_token", usual)
    ends = settings.get("tokenizer.ggml.add_eos_token", False)
    frame = {}
    for name, adds in (("bos", begins), ("eos", ends)):
        number = settings.get(f"tokenizer.ggml.{name}_token_id")
        if adds and number is not None:
            frame[name] = tokens[number], number
    if frame:
        words = [frame[name][0] if name in frame else "" for name in ("bos", "eos")]
        template = f"{words[0]} $A {words[1]}".strip()
        made.post_processor = processors.TemplateProcessing(template, None, list(frame.values()))


def make_settings(file: GgufFile) -> dict[str, Any]:
    """Return tokenizer_config.json."""
    settings = file.settings
    tokens = settings["tokenizer.ggml.tokens"]
    names = (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
    found: dict[str, Any] = {
        f"{name}_token": str(tokens[settings[f"tokenizer.ggml.{key}_token_id"]])
        for name, key in names
        if f"tokenizer.ggml.{key}_token_id" in settings
    }
    if template := settings.get("tokenizer.chat_template"):
        found["chat_template"] = template
    return {**found, "tokenizer_class": "PreTrainedTokenizerFast"}
