"""Makes golden pairs: what sentence-transformers reads of them where a chat template writes them.

Its rules are written down here once more, and the template is rendered as a whole, by transformers where that
is installed: what the manifest has of it is what is checked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from ...models.pair_messages import MessageSettings
from ...runtime.apps.check.golden_texts import GoldenInput
from ..checkpoints.pair_templates import open_pair_renderer
from .golden_samples import PAIRS, TEXTS

if TYPE_CHECKING:
    from ...runtime.text.tokenizer import Tokenizer
    from ..checkpoints.checkpoint import Checkpoint
    from .golden_texts import Reference

PAIR = "pair"  # what such texts are, in the place of a query or a document
INSTRUCTION = "Find the sentence that says the same: à l'été."
LONG = " ".join(TEXTS * 4)  # is cut wherever a length is
FILLERS = ("0", "1 2 3 4")

Render = Callable[[str, str, str], str]  # of query, document and prompt


def make_pair_inputs(reference: Reference, checkpoint: Checkpoint, theirs: Any) -> Iterator[GoldenInput]:
    """Yield pairs, with and without a prompt, where a chat template writes them.

    Special tokens that a text spells are read as such by sentence-transformers, so such texts are left out.
    """
    encoder = checkpoint.encoder
    modules = checkpoint.modules
    if encoder is None or encoder.pairs is None or modules is None or modules.messages is None:
        return
    render = make_renderer(checkpoint, modules.messages, theirs)
    usual = "" if modules.default_prompt is None else modules.prompts[modules.default_prompt]
    prompts: dict[str | None, str] = {None: usual}  # what is read, by what a caller gives
    if encoder.pairs.prompted is not None:
        prompts[INSTRUCTION] = INSTRUCTION
    pairs = [*PAIRS, *pairwise(TEXTS), (LONG, TEXTS[0]), (TEXTS[0], LONG)]
    for given, prompt in prompts.items():
        for query, document in pairs:
            if not spells_token(checkpoint.tokenizers[0], query + document):
                ids = read_ids(reference, render, checkpoint, query, document, prompt)
                yield GoldenInput(query, document, tuple(ids), PAIR, prompt=given)


def make_renderer(checkpoint: Checkpoint, messages: MessageSettings, theirs: Any) -> Render:
    """Return what renders pairs: transformers' tokenizer, or PlanForge's sandbox where there is none."""
    if theirs is not None:
        options = {"chat_template": messages.template, **messages.options}

        def render_there(query: str, document: str, prompt: str) -> str:
            written = messages.make_messages(query, document, prompt)
            rendered: str = theirs.apply_chat_template(written, tokenize=False, **options)
            return rendered

        return render_there
    renderer = open_pair_renderer(checkpoint.folder, messages)
    assert renderer is not None  # the encoder has templates

    def render_here(query: str, document: str, prompt: str) -> str:
        return renderer.render({"query": query, "document": document, "prompt": prompt})

    return render_here


def read_ids(
    reference: Reference, render: Render, checkpoint: Checkpoint, query: str, document: str, prompt: str
) -> Sequence[int]:
    """Return a pair's ids: cut at the end, and then ended as every pair ends."""
    most = checkpoint.choices.max_length
    ids = reference.encode(render(query, document, prompt))[:most]
    if len(ids) < most:
        return ids
    first, second = (reference.encode(render(text, text, prompt)) for text in FILLERS)
    same = 0
    while same < min(len(first), len(second)) and first[-1 - same] == second[-1 - same]:
        same += 1
    if same == min(len(first), len(second)):
        return ids
    end = first[len(first) - same :][-most:]
    return ids[: len(ids) - len(end)] + end


def spells_token(tokenizer: Tokenizer, text: str) -> bool:
    """Return whether a text spells a special token, in any case of its letters."""
    return any(token.lower() in text.lower() for token in tokenizer.special_tokens)
