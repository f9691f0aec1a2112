"""The texts of answers whose tokens have the spaces before words: behind a prompt, in chats, by a grammar."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import tokenizers

from planforge.runtime import Generation, TextGenerator
from planforge.runtime.text.tokenizer import Tokenizer

from ...helpers.chat_templates import chat_of
from ...helpers.generation import LOOKUP, REUSE, generator, joined
from ...helpers.text import SPACED, SPACED_DECODERS, spaced

CHAT = chat_of("{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}")
ASKED = [{"role": "user", "content": "The"}]
IM_END = SPACED.index("<|im_end|>")


@pytest.fixture(scope="module", params=SPACED_DECODERS)
def model(request: pytest.FixtureRequest) -> TextGenerator:
    """A model that answers each token with the one behind it in SPACED."""
    return generator("ort", counts=True, chat=CHAT, tokenizer=spaced(request.param))[0]


def go_on(tokenizer: Tokenizer, prompt: Sequence[int], ids: Sequence[int]) -> str:
    """What tokenizers shows of ids that go on with a prompt."""
    stream = tokenizers.decoders.DecodeStream(ids=list(prompt), skip_special_tokens=True)
    raw = tokenizers.Tokenizer.from_str(tokenizer.write_json())
    return "".join(stream.step(raw, token) or "" for token in ids)


@pytest.mark.parametrize(
    "prompt", ["The", "The cat", [0], [0, 1], [1, IM_END], [IM_END], [6], [6, IM_END, 7]]
)
def test_an_answer_goes_on_with_its_prompt(model: TextGenerator, prompt: Any) -> None:
    ids = model.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
    how: dict[str, Any] = {"max_new_tokens": 7}
    answers: list[Generation] = [
        model.generate(prompt, **how),
        *model.generate([prompt, prompt], **how),
        *model.iterate([prompt], **how),
        model.generate(prompt, **how, **LOOKUP),
        model.generate(prompt, **how, **REUSE),
        model.submit(prompt, **how).result(),
        model.generate(prompt, num_beams=2, max_new_tokens=3),
    ]
    for answer in answers:
        assert answer.text == go_on(model.tokenizer, ids, answer.token_ids)
    assert joined(model.stream(prompt, **how)) == answers[0].text == joined(model.submit(prompt, **how))
    assert [candidate.text for candidate in answers[-1].candidates] == [answers[-1].text]
    if prompt == "The":
        assert answers[0].text.startswith(" cat satcat\n")


def test_a_text_that_grows_by_its_answers_reads_as_the_model_wrote_it(model: TextGenerator) -> None:
    """The loop of docs/generate.md: what was read and written once is found again."""
    text = "The"
    written = model.tokenizer.encode(text)
    for _ in range(2):
        answer = model.generate(text, max_new_tokens=1, **REUSE)
        written += answer.token_ids
        text += answer.text
        assert model.tokenizer.encode(text) == written
    assert text == "The cat sat"
    assert answer.prompt_tokens_reused == 1  # of two: the last one's logits are needed


def test_a_chats_answer_begins_without_a_space(model: TextGenerator) -> None:
    options: dict[str, Any] = {
        "max_new_tokens": 5,
        "logit_bias": {SPACED.index("▁on"): 9},
        "generation": None,
    }
    for answer in (
        model.chat(ASKED, **options),
        model.submit_chat(ASKED, **options).result(),
        model.chat(ASKED, regex="on on", **options),
    ):
        assert answer.text.startswith("on on")
        assert answer.token_ids[0] == SPACED.index("▁on")


@pytest.mark.parametrize(
    ("options", "texts"),
    [
        ({"regex": " cat user"}, {" cat user"}),
        ({"regex": "cat user"}, {"cat user"}),
        ({"regex": "( |\n)cat"}, {" cat", "\ncat"}),
        ({"choices": [" cat"]}, {" cat"}),
        ({"choices": ["cat user", " user"]}, {"cat user", " user"}),
        ({"grammar": 'start: " "? "user" " cat"'}, {" user cat", "user cat"}),
    ],
)
def test_what_an_answer_is_held_to_is_its_text(model: TextGenerator, options: Any, texts: set[str]) -> None:
    how: dict[str, Any] = {**options, "max_new_tokens": 9}
    answers = []
    for favourite in ("c", "▁", "▁cat"):
        how["logit_bias"] = {SPACED.index(favourite): 9}
        answers += [
            model.generate("The", **how),
            model.generate([IM_END], **how),
            model.generate("The", **how, **LOOKUP),
            model.submit("The", **how).result(),
            model.chat(ASKED, **how),
            model.chat(ASKED, **how, **LOOKUP),
        ]
    for answer in answers:
        assert (answer.text in texts, answer.finish_reason) == (True, "stop"), answer


@pytest.mark.parametrize(
    ("stop", "text"),
    [
        ("<|im_end|>", " cat satcat\n "),
        ("<|im_start|>user", " cat satcat\n "),
        ("\n <|im_end|>", " cat satcat"),
        (" <|im_end|><|im_start|>", " cat satcat\n"),
        ("im_st", " cat satcat\n "),
        ("user on", " cat satcat\n "),
        (["user", "<|im_start|>u"], " cat satcat\n "),
        ("<|im_end|>user", None),
    ],
)
def test_a_stop_string_with_special_tokens_ends_the_answer(
    model: TextGenerator, stop: str | list[str], text: str | None
) -> None:
    how: dict[str, Any] = {"max_new_tokens": 10, "stop": stop}
    answer = model.generate("The", **how)
    assert (answer.finish_reason == "stop") == (text is not None)
    assert answer.text == (text or " cat satcat\n user on")
    for chunks in (model.stream("The", **how), model.submit("The", **how)):
        assert joined(chunks) == answer.text
    assert model.generate("The", **how, **LOOKUP).text == answer.text
