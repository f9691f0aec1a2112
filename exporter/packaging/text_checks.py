"""Checks of texts: how a runtime tokenizes them, and how it renders chats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...runtime.apps.check.golden_texts import GoldenTexts, find_texts, read_texts
from ...runtime.apps.check.outcome import Outcome
from ...runtime.bundle.bundle import Bundle
from .check import Answer, Check, describe_difference, report


def list_text_checks(bundle: Bundle) -> list[Check]:
    """Return the checks that texts are tokenized and chats are rendered as in golden texts."""
    file = find_texts(bundle)
    if file is None:
        return []
    golden = read_texts(file)
    checks = [make_reading_check(golden)]
    if golden.plain_inputs:
        checks.append(make_input_check(golden))
    if bundle.manifest.encoder is None:
        checks.append(make_writing_check(golden))
    plain = [chat for chat in golden.chats if chat.rendered is not None and not chat.tools]
    if plain:
        questions = [{"kind": "chat", "messages": [dict(m) for m in chat.messages]} for chat in plain]

        def judge(answers: Sequence[Answer]) -> Outcome:
            pairs = zip(answers, plain, strict=True)
            return report_differences([(str(c.messages), a["text"], c.rendered) for a, c in pairs])

        checks.append(Check("chats", questions, judge, of_files=True))
    return checks


def make_reading_check(golden: GoldenTexts) -> Check:
    """Return the check of the ids of golden texts, read by the runtime's own tokenizer."""
    texts = golden.sides[0]

    def judge(answers: Sequence[Answer]) -> Outcome:
        (answer,) = answers
        pairs = zip(answer["ids"], texts, strict=True)
        return report_differences([(text.text, ids, list(text.ids)) for ids, text in pairs])

    question = {"kind": "read", "texts": [text.text for text in texts]}
    return Check("ids of texts", [question], judge, of_files=True)


def make_writing_check(golden: GoldenTexts) -> Check:
    """Return the check of decoding ids to text, by the runtime's tokenizer (a translator's target's)."""
    texts = golden.sides[-1]

    def judge(answers: Sequence[Answer]) -> Outcome:
        (answer,) = answers
        pairs = zip(answer["texts"], texts, strict=True)
        return report_differences([(str(list(text.ids)), got, text.decoded) for got, text in pairs])

    question = {"kind": "write", "ids": [list(text.ids) for text in texts], "target": len(golden.sides) > 1}
    return Check("texts of ids", [question], judge, of_files=True)


def make_input_check(golden: GoldenTexts) -> Check:
    """Return the check of all ids that a model reads for a text or a pair, by the runtime's tokenizer."""

    def judge(answers: Sequence[Answer]) -> Outcome:
        (answer,) = answers
        pairs = zip(answer["ids"], golden.plain_inputs, strict=True)
        return report_differences([(one.text, ids, list(one.ids)) for ids, one in pairs])

    texts = [{"text": one.text, "pair": one.pair} for one in golden.plain_inputs]
    return Check("ids of inputs", [{"kind": "inputs", "texts": texts}], judge, of_files=True)


def report_differences(rows: Sequence[tuple[str, Any, Any]]) -> Outcome:
    """Return an outcome that fails with the first texts whose results differ from the expected ones."""
    failures = [f"{text!r:.60} {describe_difference(got, want)}" for text, got, want in rows if got != want]
    return report("texts", len(rows), failures)
