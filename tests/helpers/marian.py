"""A small MarianMT tokenizer in Hugging Face layout, trained on texts of this file."""

from __future__ import annotations

import functools
import io
import json
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

import planforge.exporter

from .text import ODD_TEXTS

ENGLISH = """
The quick brown fox jumps over the lazy dog, and the dog sleeps on.
I would like a cup of coffee, please; no sugar, but a little milk.
She said: "It's raining again, isn't it?" We didn't know what to answer...
In 1999 there were 12,345 people in the town; today there are 67,890.
Where is the nearest station? Turn left at the bridge, then go straight on.
My friends are travelling to Munich next week, and I'm going with them!
"""
OTHERS = """
Der schnelle braune Fuchs springt über den faulen Hund, und der Hund schläft weiter.
Ich hätte gern eine Tasse Kaffee, bitte; keinen Zucker, aber ein wenig Milch.
Sie sagte: „Es regnet schon wieder, oder?“ Wir wussten nicht, was wir antworten sollten...
Im Jahr 1999 lebten 12.345 Menschen in der Stadt; heute sind es 67.890.
Wo ist der nächste Bahnhof? Biegen Sie an der Brücke links ab, dann geradeaus.
Meine Freunde fahren nächste Woche nach München, und ich fahre mit ihnen! Größe, Straße, Öl, Äpfel.
Le renard brun saute par-dessus le chien paresseux, et le chien continue de dormir.
J'aimerais une tasse de café, s'il vous plaît ; sans sucre, mais avec un peu de lait.
Où est la gare la plus proche ? Tournez à gauche après le pont, puis allez tout droit.
Ça va très bien, merci ; l'été dernier, nous étions à la forêt près du château, où naît le ruisseau.
"""
AWKWARD = [
    *ODD_TEXTS,
    "",
    " ",
    "   ",
    " \t \n \r\n \u00a0\u3000\u2003",
    "  leading, trailing  and   multiple spaces  ",
    "\ttabs\tand\nnew\r\nlines\u2028x\u2029\x85y ",
    "no\u00a0break\u202fspaces\u3000wide",
    "Ｆｕｌｌ　ｗｉｄｔｈ！ ﬁne ﬃ ½ ² Ⅷ ① ㎏ ｶﾞ ﷺ",
    "Café de\u0301ja\u0300 vu, Gro\u0308\u00dfe A\u030a Å \u212b",
    "Ａ\u0301 ﬁ\u0308 e\u0301\u0302\u0303b \u0301x \u0301 1\u20e3",
    "a" + "\u0300" * 200 + " b",
    "👨‍👩‍👧‍👦 and 👍🏽! 🇩🇪x 1️⃣ a👩b",
    "我在Berlin住了3年,東京タワーとカタカナ。서울에서 hello世界 \U00020000x",
    "日本語日本 日本語",
    "שלום \u202eעולם\u202c مرحبا ١٢٣ نَصٌّ คำ กำ हिन्दी",
    "".join(map(chr, range(32))) + "x\x7fy\x9fz",
    "zero\u200bwidth\u200c joi\u200dner \ufeffbom \u2060x so\u00adft",
    "a\ufffdb \ufffd x \U0010ffff\U0010fffe \U0010ffffthe \U0010fffe▁the \ufdd0",
    "▁the ▁▁ th▁e ▁ ▁",
    "▁",
    ">>de<< Good morning.",
    ">>de<<Good morning.",
    ">>zh_Hant<<",
    ">>de<< >>fr<< twice",
    ">>de<<>>fr<< twice",
    " >>de<< after a space",
    "In the >>de<< middle, >> and <<",
    ">> not closed",
    "</s> a</s>b <unk> <pad> <s> < /s>",
    "＜／ｓ＞ ＜pad＞",
    "a<end>b <sep>",
    "Donaudampfschifffahrtsgesellschaftskapitän" * 20,
    *(sign * length for sign in (".", "..", "-", "e", "es", "!?", "0", "日") for length in (2, 9, 50, 333)),
]
CODES = (">>de<<", ">>fr<<", ">>zh_Hant<<")


@functools.cache
def spm(side: str, **options: Any) -> bytes:
    """A SentencePiece model of one side; ``options`` are the trainer's."""
    sentencepiece = pytest.importorskip("sentencepiece")
    prompts = Path(planforge.exporter.__path__[0], "calibration/prompts.txt").read_text(encoding="utf-8")
    text = (
        ENGLISH * 2 + prompts.partition(" Call me Ishmael")[0].replace(". ", ".\n")
        if side == "source"
        else OTHERS * 2
    )
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(filter(None, text.split("\n"))),
        model_writer=written,
        hard_vocab_limit=False,
        minloglevel=2,
        num_threads=1,
        **{"vocab_size": 360, "character_coverage": 1.0} | options,
    )
    return written.getvalue()


@functools.cache
def pieces_of(model: bytes) -> tuple[str, ...]:
    """The pieces of a SentencePiece model that are not reserved."""
    sentencepiece = pytest.importorskip("sentencepiece")
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    ids = range(processor.get_piece_size())
    return tuple(
        processor.id_to_piece(i) for i in ids if not processor.is_control(i) and not processor.is_unknown(i)
    )


def write_marian_tokenizer(
    folder: Path,
    *,
    rules: str = "nmt_nfkc",
    codes: Iterable[str] = CODES,
    extra: Iterable[str] = (),
    source: bytes | None = None,
    target: bytes | None = None,
    config: dict[str, Any] | None = None,
) -> int:
    """Write source.spm, target.spm, vocab.json and tokenizer_config.json.

    Args:
        folder: Where to.
        rules: SentencePiece's normalization_rule_name.
        codes: Language codes of the vocabulary.
        extra: Further entries of the vocabulary.
        source: source.spm instead of one trained here.
        target: target.spm likewise.
        config: Entries for tokenizer_config.json.

    Returns:
        The number of entries of vocab.json. It lacks every 25th piece of each side.
    """
    source = source or spm("source", normalization_rule_name=rules)
    target = target or spm("target", normalization_rule_name=rules)
    kept = [piece for model in (source, target) for n, piece in enumerate(pieces_of(model)) if n % 25 != 7]
    lacking = {piece for model in (source, target) for n, piece in enumerate(pieces_of(model)) if n % 25 == 7}
    union = [piece for piece in sorted(set(kept)) if piece not in lacking]
    tokens = list(dict.fromkeys(["</s>", "<unk>", *union, *codes, *extra, "<pad>"]))
    (folder / "source.spm").write_bytes(source)
    (folder / "target.spm").write_bytes(target)
    vocab = {token: index for index, token in enumerate(tokens)}
    (folder / "vocab.json").write_text(json.dumps(vocab), encoding="utf-8")
    settings = {"source_lang": "en", "target_lang": "mul", **(config or {})}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return len(tokens)


def load_marian_reference(folder: Path) -> Any:
    """transformers' MarianTokenizer of a folder."""
    transformers = pytest.importorskip("transformers")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Recommended: pip install sacremoses", UserWarning)
        return transformers.MarianTokenizer.from_pretrained(str(folder))
