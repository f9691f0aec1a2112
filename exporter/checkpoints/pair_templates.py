"""Learns how a chat template writes a query and a document, from what it makes of texts in their places."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...runtime.bundle.pair_templates import PROMPT, PairTemplate, PairTemplates
from ...runtime.bundle.role_defaults import DOCUMENT, QUERY
from ...runtime.errors import BundleError, InputError
from ...runtime.text.chat import check_template_size, compile_template
from ..errors import CheckpointError, raise_checkpoint_errors
from .chat_template import check_is_text, list_templates
from .tokenizers.files import read_named_tokens, read_settings

if TYPE_CHECKING:
    from ...models.pair_messages import MessageSettings
    from ...models.sentence_transformers import SentenceModules
    from ...runtime.text.chat_template import ChatTemplate

NAMES = {"default", None}  # of the usual template
GENERATION = "add_generation_prompt"
MARKS = {PROMPT: "Xpromptx", QUERY: "Xqueryx", DOCUMENT: "Xdocumentx"}  # what no template writes itself
SPACED = " \n{}\t "
YEARS = (2026, 2031)  # in which a template writes the same
# Values of prompt, query and document: what a template may treat in another way.
PROBES = (
    ("a", "b", "c"),
    ("1 2 3 4", "", ""),
    (" one\n", "  two  words\n\n", "\ttab\r\n\r\nlines \n"),
    ("{{ messages }}", "{% if x %} {# y #}", "<b>&amp;</b> \"quoted\" 'too' \\n"),
    ("Größe", "我在北京 🙂", "ﬁne ½ é"),
    ("</think>\n\nx", "<think> a </think> b", "<|im_end|>\n<|im_start|>user\n </s> [SEP]"),
    ("one word " * 1000, "one word " * 1000, "one word " * 20_000),
)
WAY_OUT = (
    "Supported is a template that writes both texts as they are, or without the spaces at their ends, between"
    ' fixed texts, such as {{ (messages | selectattr("role", "eq", "query") | first).content }}'
)


@dataclass(frozen=True)
class PairRenderer:
    """A chat template with all that it reads beside the messages.

    Attributes:
        template: ready to be rendered.
        messages: how a pair becomes messages.
        variables: of the template.
    """

    template: ChatTemplate
    messages: MessageSettings
    variables: Mapping[str, Any]

    def render(self, values: Mapping[str, str], year: int = YEARS[0]) -> str:
        """Return the text of a pair, by "query", "document", and "prompt" where there is one."""
        given = self.messages.make_messages(values[QUERY], values[DOCUMENT], values.get(PROMPT, ""))
        moment = datetime(year, 2, 3, 16, 5, 6)
        return self.template.render(
            {**self.variables, "messages": given, "strftime_now": lambda form: moment.strftime(form)}
        )


def read_pair_templates(modules: SentenceModules) -> PairTemplates | None:
    """Return what a folder's chat template writes around pairs; None where none writes them.

    Raises:
        CheckpointError: no such template, or it is not of fixed texts around a query and a document.
    """
    renderer = open_pair_renderer(modules.transformer, modules.messages)
    if renderer is None:
        return None
    plain = learn_template(renderer, (QUERY, DOCUMENT))
    try:
        prompted = learn_template(renderer, (PROMPT, QUERY, DOCUMENT))
    except InputError as error:  # it refuses a system's message
        if modules.default_prompt is not None:
            raise CheckpointError(
                f"{renderer.template.source} refuses the prompt that every pair gets: {error}"
            ) from error
        return PairTemplates(plain)
    return PairTemplates(plain, prompted if PROMPT in prompted.slots else None)


def open_pair_renderer(folder: Path, messages: MessageSettings | None) -> PairRenderer | None:
    """Return the chat template that writes a folder's pairs; None where they stay two texts."""
    if messages is None:
        return None
    settings = read_settings(folder)
    with raise_checkpoint_errors():
        templates = list_templates(folder, settings)
    if messages.format is None:
        if not templates:
            return None
        raise CheckpointError(
            f"{folder} has a chat template, and no modality_config in sentence_bert_config.json that says how"
            " pairs become messages; load the model with sentence-transformers 6, and save it again"
        )
    source = f"the chat template of {folder}"
    if messages.template not in NAMES:
        source = f"the chat template {messages.template!r:.40} of {folder}"
    text = templates.get(messages.template or "default", messages.template)
    if text is None:
        raise CheckpointError(f"{folder} has no chat template, which its sentence_bert_config.json asks for")
    if settings.get("truncation_side", "right") != "right":
        raise CheckpointError(
            f"{folder}: tokenizer_config.json sets truncation_side={settings['truncation_side']!r:.40};"
            " beside a chat template only 'right' is supported"
        )
    with raise_checkpoint_errors():
        check_template_size(len(check_is_text(text).encode()))
    with raise_checkpoint_errors(BundleError):
        template = compile_template(text, source)
    if unknown := set(messages.options) - template.variables - {GENERATION}:
        raise CheckpointError(
            f"{folder}: sentence_bert_config.json sets {', '.join(sorted(unknown))} for the chat template,"
            " which does not read it; leave it out"
        )
    tokens = read_named_tokens(settings)
    variables = {"tools": None, "documents": None, GENERATION: False, **tokens, **messages.options}
    return PairRenderer(template, messages, variables)


def learn_template(renderer: PairRenderer, roles: tuple[str, ...]) -> PairTemplate:
    """Return the fixed texts around the texts of some roles, and check that all pairs are written so.

    Raises:
        CheckpointError: they are not; tells the first pair.
        InputError: a prompt's message is refused.
    """
    source = renderer.template.source
    marks = {role: MARKS[role] for role in roles}
    try:
        rendered, later = (renderer.render(marks, year) for year in YEARS)
        spaced = renderer.render({role: SPACED.format(mark) for role, mark in marks.items()})
    except (InputError, BundleError) as error:
        if isinstance(error, InputError) and PROMPT in roles:
            raise
        raise CheckpointError(f"{source} cannot write a query and a document: {error}. {WAY_OUT}") from error
    if rendered != later:
        raise CheckpointError(f"{source} writes the time, so that no score can be repeated. {WAY_OUT}")
    found = re.compile("|".join(MARKS.values()))
    by_mark = {mark: role for role, mark in MARKS.items()}
    slots = tuple(by_mark[mark] for mark in found.findall(rendered))
    if missing := [role for role in (QUERY, DOCUMENT) if role not in slots]:
        raise CheckpointError(
            f"{source} does not write the {' and the '.join(missing)} as given: of the query"
            f" {MARKS[QUERY]!r} and the document {MARKS[DOCUMENT]!r} it makes {rendered!r:.300}. {WAY_OUT}"
        )
    trimmed = tuple(role for role in roles if role in slots and SPACED.format(MARKS[role]) not in spaced)
    template = PairTemplate(tuple(found.split(rendered)), slots, trimmed)
    for texts in PROBES:
        check_probe(renderer, template, {role: dict(zip(MARKS, texts, strict=True))[role] for role in roles})
    return template


def check_probe(renderer: PairRenderer, template: PairTemplate, values: Mapping[str, str]) -> None:
    """Refuse a chat template that writes these values in another way than was learned from others."""
    source = renderer.template.source
    told = " and ".join(f"the {role} {text!r:.60}" for role, text in values.items())
    try:
        rendered = renderer.render(values)
    except (InputError, BundleError) as error:
        raise CheckpointError(f"{source} cannot write {told}: {error}. {WAY_OUT}") from error
    expected = template.fill(values)
    if rendered == expected:
        return
    pairs = enumerate(zip(rendered, expected, strict=False))
    place = next((i for i, (a, b) in pairs if a != b), min(len(rendered), len(expected)))
    begin = max(0, place - 10)
    raise CheckpointError(
        f"{source} does not write every pair in the same way: of {told} it makes, from character {begin} on,"
        f" {rendered[begin : begin + 60]!r}, and by other pairs it is {expected[begin : begin + 60]!r}."
        f" {WAY_OUT}"
    )
