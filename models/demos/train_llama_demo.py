#!/usr/bin/env python3
"""Train the Llama demo model from scratch on the King James Bible, as text and as chats.

    python models/demos/train_llama_demo.py --out models/demos/llama-demo [--minutes N | --steps N]

In a chat the user says a verse, and the assistant answers with the one that follows.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from planforge.models.demos.bible import END, END_ID, VOCAB_SIZE, Book, Chapter, text_of, token_stream
from planforge.models.demos.language_model import SEED, Recipe, run_command

CONTEXT = 512
TURN = "<|im_start|>"
TURN_END = "<|im_end|>"
TURN_END_ID = 2
ROLES = ("user", "assistant")
TURNS = 8  # the most verses of a chat
CHAT_TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def new_model() -> LlamaForCausalLM:
    """Return an untrained Llama with four heads of queries and two of keys and values."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=END_ID,
        eos_token_id=END_ID,
    )
    return LlamaForCausalLM(config)


def make_stream(tokenizer: Tokenizer, books: list[Book]) -> list[int]:
    """Return the tokens to train on: every book as it is, then its chapters as chats."""
    rng = random.Random(SEED)
    texts = []
    for book in books:
        texts.append(text_of(book))
        texts += [chat for chapter in book for chat in chats_of(chapter, rng)]
    return token_stream(tokenizer, texts)


def chats_of(chapter: Chapter, rng: random.Random) -> Iterator[str]:
    """Yield a chapter's verses in chats of two to TURNS turns, as the template writes them."""
    start = 0
    while start < len(chapter) - 1:
        verses = chapter[start : start + 2 * rng.randint(1, TURNS // 2)]
        turns = [f"{TURN}{ROLES[i % 2]}\n{verse}{TURN_END}\n" for i, verse in enumerate(verses)]
        yield "".join(turns)
        start += len(verses)


def finish(model: PreTrainedModel, out: Path) -> None:
    """Write the chat template; an answer ends where its turn does."""
    (out / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    model.generation_config.eos_token_id = [END_ID, TURN_END_ID]


RECIPE = Recipe(
    model=new_model,
    dtype=torch.bfloat16,
    context=CONTEXT,
    batch=8,
    learning_rate=3.0e-3,
    special_tokens=[END, TURN, TURN_END],
    fused={},
    make_stream=make_stream,
    finish=finish,
    facts={"chats": f"the same chapters, a verse a turn, 2 to {TURNS} turns"},
)

if __name__ == "__main__":
    run_command(RECIPE, "Train the Llama demo model.")
