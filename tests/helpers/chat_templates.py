"""Chat templates of tests, and models that have them."""

from __future__ import annotations

from hypothesis import strategies as st

from planforge.runtime.text.chat import Chat
from planforge.runtime.text.special_tokens import MARK

from .chat import KINDS, ROLES, SPECIAL
from .text import ODD_TEXTS

MARKS = MARK + "\U000f0000\U000f0001"  # transformers has two of its own


kinds = st.sampled_from(sorted(KINDS))


texts = st.one_of(
    st.text(st.characters(exclude_characters=MARKS, exclude_categories=["Cs"])),
    st.sampled_from(ODD_TEXTS),
    st.lists(st.sampled_from([*SPECIAL, "<|im_", "end|>", " ", "a", "é", "\n", "[", "</think>"])).map(
        "".join
    ),
)


def chat_of(template: str, tokens: dict[str, str] = ROLES) -> Chat:
    return Chat(template, tokens, "bundle/tokenizer/chat_template.jinja")


PLAIN = "{% for m in messages %}{{ m.content }}{{ 'k' if m.role == 'user' else 'j' }}{% endfor %}"
