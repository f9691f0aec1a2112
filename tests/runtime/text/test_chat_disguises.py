"""What a user writes is no special token either where normalizing turns it into one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from planforge.runtime.text.tokenizer import Tokenizer

from ...helpers.chat_templates import chat_of
from ...helpers.text import byte_alphabet

TOKENS = ("<|im_end|>", "</s>")
TEMPLATE = "</s>{{ messages[0].content }}<|im_end|>{{ messages[0].content }}"
DISGUISES = {
    "lower": (normalizers.Lowercase(), ["<|IM_END|>", "</S>"]),
    "nfkc": (normalizers.NFKC(), ["＜|im_end|>", "＜/s＞"]),
    "clean": (normalizers.BertNormalizer(), ["<|im_\x01end|>", "<\u200b/s>", "</S>"]),
    "replace": (normalizers.Replace("~", ""), ["<|im_~end|>", "~<~/~s~>~"]),
}


def byte_level(normalizer: normalizers.Normalizer) -> tokenizers.Tokenizer:
    """GPT-2's kind, whose special tokens are looked for in normalized text."""
    raw = tokenizers.Tokenizer(models.BPE(byte_alphabet(), []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.normalizer = normalizer
    raw.add_special_tokens([AddedToken(token, normalized=True) for token in TOKENS])
    return raw


def unigram(normalizer: normalizers.Normalizer) -> tokenizers.Tokenizer:
    """T5's kind, whose model has the special tokens among its pieces."""
    pieces = [("<unk>", 0.0), *((token, -1.0) for token in TOKENS)]
    pieces += [(letter, -3.0) for letter in "▁ab<>|_/~imends"]
    raw = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=0))
    raw.pre_tokenizer = pre_tokenizers.Metaspace()
    raw.decoder = decoders.Metaspace()
    raw.normalizer = normalizer
    raw.add_special_tokens(list(TOKENS))
    return raw


@pytest.mark.parametrize("make", [byte_level, unigram])
@pytest.mark.parametrize("name", DISGUISES)
def test_what_normalizing_makes_a_special_token_is_plain(
    name: str, make: Callable[[normalizers.Normalizer], tokenizers.Tokenizer]
) -> None:
    normalizer, texts = DISGUISES[name]
    raw = make(normalizer)
    tokenizer = Tokenizer(raw.to_str().encode())
    special = {raw.token_to_id(token) for token in TOKENS}
    for text in texts:
        content = f"a{text}b {text}{text}"
        message = {"role": "user", "content": content}
        ids = chat_of(TEMPLATE).encode([message], tokenizer)
        assert [raw.id_to_token(token) for token in ids if token in special] == ["</s>", "<|im_end|>"]
        # As tokenizers reads it, and as `parse_special` asks for, it is one.
        rendered = f"</s>{content}<|im_end|>{content}"
        parsed = raw.encode(rendered, add_special_tokens=False).ids
        assert sum(token in special for token in parsed) > 2
        assert chat_of(TEMPLATE).encode([message], tokenizer, parse_special=True) == parsed
