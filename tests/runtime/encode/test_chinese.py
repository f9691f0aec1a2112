"""A Chinese BERT: a character is a token, a rare one is unknown, and masks are filled as by transformers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from planforge.exporter import export
from planforge.runtime import TextEncoder

from ...helpers.models import tiny_bert

# As bert-base-chinese's vocabulary: characters, the same inside a word, pieces of Latin words, cased digits.
CHARACTERS = list("今天气很好我在北京东上海住了年是一个城市，。！？中国")
LATIN = ["bert", "##ing", "i", "##Phone", "Phone", "B", "##ER", "##T", "3", "##3", "20", "##26"]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
VOCABULARY = [*SPECIAL, *CHARACTERS, *(f"##{character}" for character in CHARACTERS), *LATIN]
# What the rules of BERT's tokenizer make of texts: a CJK character stands alone, whatever is beside it. One
# that the vocabulary lacks is unknown. Latin words are cut into pieces, and case counts.
TEXTS = {
    "今天天气很好。": "今 天 天 气 很 好 。",
    "我在北京住了3年": "我 在 北 京 住 了 3 年",
    "iPhone是bert，BERT！": "i ##Phone 是 bert ， B ##ER ##T ！",
    "龘是中国 一个龘城": "[UNK] 是 中 国 一 个 [UNK] 城",
    "２０２６年？": "[UNK] 年 ？",
    "2026年 上海\u3000东京": "20 ##26 年 上 海 东 京",
    "東京": "[UNK] 京",
    "ひ中": "[UNK] 中",
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chinese") / "checkpoint"
    tiny_bert(folder, "BertForMaskedLM", vocab_size=len(VOCABULARY), num_hidden_layers=1)
    (folder / "vocab.txt").write_text("".join(f"{word}\n" for word in VOCABULARY), encoding="utf-8")
    settings = {"tokenizer_class": "BertTokenizer", "do_lower_case": False, "model_max_length": 64}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def encoder(checkpoint: Path) -> Iterator[TextEncoder]:
    bundle = checkpoint.parent / "bundle"
    export(checkpoint, bundle, target="cpu", precision="fp32", verify="quick")
    with TextEncoder.load(bundle) as opened:
        yield opened


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Path) -> Any:
    return transformers.BertTokenizer.from_pretrained(checkpoint)


@pytest.mark.parametrize("text", TEXTS)
def test_texts_are_cut_as_bert_cuts_them(encoder: TextEncoder, tokenizer: Any, text: str) -> None:
    ids = encoder.tokenizer.encode(text)
    assert encoder.tokenizer.spell_all(ids) == TEXTS[text].split()
    assert ids == tokenizer(text, add_special_tokens=False)["input_ids"]


def test_characters_keep_their_places(encoder: TextEncoder) -> None:
    features = encoder.features("我在 北京", layers="last")
    assert list(features.tokens) == ["[CLS]", "我", "在", "北", "京", "[SEP]"]
    assert list(features.offsets[1:-1]) == [(0, 1), (1, 2), (3, 4), (4, 5)]


def test_a_mask_is_filled_as_transformers_fills_it(
    encoder: TextEncoder, tokenizer: Any, checkpoint: Path
) -> None:
    text = "北京是中国的[MASK]都，是一个城市。"
    model = transformers.BertForMaskedLM.from_pretrained(checkpoint).eval()
    given = tokenizer(text, return_tensors="pt")
    with torch.no_grad():
        logits = model(**given).logits[0]
    place = int((given["input_ids"][0] == tokenizer.mask_token_id).nonzero())
    shares, best = logits[place].softmax(-1).topk(5)
    (fills,) = encoder.fill_mask(text, top_k=5).masks
    assert [fill.token_id for fill in fills] == best.tolist()
    assert [fill.token for fill in fills] == tokenizer.convert_ids_to_tokens(best.tolist())
    np.testing.assert_allclose([fill.score for fill in fills], shares, rtol=0, atol=1e-5)
