"""Lists the texts and chats of the golden set: languages, emoji, code, spaces, special tokens."""

# ruff: noqa: RUF001 (look-alike letters are what the texts are for)

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...runtime.text.tokenizer import Tokenizer

TEXTS = (
    "In the beginning was the Word, and it weighed 3.14 kg.",
    "NASA LAUNCHED A ROCKET",
    "nasa launched a rocket",
    "It's what they'd said: we've won, I'm sure; don't you'll see?",
    "the 3rd of May, 1998",
    "On 2026-11-25 at 09:30 we paid 1,234,567.89 EUR (12.5 %).",
    "Die Größe der Straße überrascht Äpfel, Öl und Übermut.",
    "L'été dernier, où naît le ruisseau, ça allait très bien.",
    "El niño pequeño comió piñas mañana, ¿verdad? ¡Sí!",
    "Żółw i łabędź, Příliš žluťoučký kůň, İstanbul'da ılık ışık",
    "Съешь же ещё этих мягких французских булок",
    "Ξεσκεπάζω την ψυχοφθόρα βδελυγμία ΟΔΟΣ",
    "שלום עולם מרחבא",
    "مرحبا بالعالم ١٢٣ نَصٌّ",
    "नमस्ते दुनिया, कैसे हो?",
    "สวัสดีชาวโลก",
    "我在北京住了三年。",
    "東京タワーとカタカナとひらがな",
    "안녕하세요 세계",
    "Xin chào thế giới, tiếng Việt",
    "🙂 👍🏽 👨‍👩‍👧 🇩🇪 1️⃣ ❤️",
    "e\u0301 é A\u030a Å ﬁne ½ ² Ⅷ Ｆｕｌｌ　ｗｉｄｔｈ",
    "def f(x: int) -> list[int]:\n\tif x != 0:\n\t\treturn [x ** 2]  # squared\n    return []\n",
    '{"a": [1, 2.5e-3, null], "b": "c\\n"}',
    "for (int i = 0; i < n; ++i) { sum += a[i] * b[i]; }",
    "SELECT * FROM t WHERE x >= 10 AND y LIKE '%z_';",
    "https://example.org/path?query=1&b=%20#part mail@example.org C:\\dir\\file.txt",
    "<p class='x'>Tom &amp; Jerry</p> <!-- comment -->",
    "  leading, trailing  and   several    spaces  ",
    "\ttabs\tand\nnew\n\nlines\r\nof two kinds",
    "no\u00a0break\u202fspaces\u3000wide zero\u200bwidth so\u00adft",
    "...!!! ??? --- *** ___ ~~~ ### $$$ ^^^ ``` |||",
    "CamelCase snake_case kebab-case UPPER_CASE mixedCASE123abc",
    "Donaudampfschifffahrtsgesellschaftskapitän antidisestablishmentarianism",
    " John met Zoë in Ünlü's Café",
    "JOHN MET ZOË IN ÜNLÜ'S CAFÉ",
    "a",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa 0000000000000000",
)
PAIRS = (
    ("Who sells food?", "The baker sells bread."),
    ("Wings lift the plane.", "NASA LAUNCHED A ROCKET"),
)
SPECIAL = 12  # special tokens that a chat spells, of a tokenizer with more
ADDED = 512  # added tokens that texts spell, of a tokenizer with more
WORDS = 512  # tokens of the vocabulary that texts are made of
WORDS_IN_A_TEXT = 32
TOOL = {
    "type": "function",
    "function": {
        "name": "find_weather",
        "description": "Finds the weather of a town.",
        "parameters": {
            "type": "object",
            "properties": {"town": {"type": "string", "description": "Its name."}},
            "required": ["town"],
        },
    },
}

Chat = tuple[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]]  # messages and tools


def make_added_texts(tokenizer: Tokenizer) -> list[str]:
    """Return texts that spell added tokens: between words, within one, before and after a space.

    Of a tokenizer with more than `ADDED` of them, tokens from all over their list.
    """
    tokens = tokenizer.added_tokens
    count = min(ADDED, len(tokens))
    chosen = [tokens[place * len(tokens) // count] for place in range(count)]
    texts = [f"{token}Begin, in the {token} middle, at the end {token}" for token in chosen[:SPECIAL]]
    return [
        *texts,
        *(f"In{token}side a word, before{token} and {token}behind  {token}  it" for token in chosen),
    ]


def make_vocabulary_texts(tokenizer: Tokenizer) -> list[str]:
    """Return texts of tokens from all over the vocabulary, so that each part of it is seen."""
    count = min(WORDS, tokenizer.vocab_size)
    ids = [place * tokenizer.vocab_size // count for place in range(count)]
    parts = [ids[start : start + WORDS_IN_A_TEXT] for start in range(0, count, WORDS_IN_A_TEXT)]
    return [text for part in parts if (text := tokenizer.decode(part)).strip()]


def make_chats(tokenizer: Tokenizer, with_tools: bool) -> list[Chat]:
    """Return conversations: of one turn and of several, with a system's message, with tools."""
    system = {"role": "system", "content": "You answer in one sentence."}
    first = {"role": "user", "content": "Who are you?"}
    answer = {"role": "assistant", "content": "A model.\n\nWith two paragraphs. 🙂"}
    second = {"role": "user", "content": "  Was ist 2 + 2?\n"}
    chats: list[Chat] = [
        ([first], []),
        ([system, first], []),
        ([first, answer, second], []),
        ([system, first, answer, second], []),
        ([{"role": "user", "content": "{{ messages }} {% if %} <b>&amp;</b> \"quoted\" 'too' 日本語"}], []),
    ]
    if tokenizer.special_tokens:
        spelled = " ".join(tokenizer.special_tokens[:SPECIAL])
        chats.append(([{"role": "user", "content": f"I spell {spelled} out"}], []))
    if with_tools:
        chats.append(([first], [TOOL]))
        chats.append(([system, first, answer, second], [TOOL]))
    return chats
