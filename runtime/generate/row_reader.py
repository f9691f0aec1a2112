"""Turns a caller's prompts and conversations into rows that are ready to be answered."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ..bundle.defaults import GenerationDefaults
from ..bundle.manifest import Artifact
from ..errors import ContextLengthError, InputError
from ..option_checks import check_not_pair
from ..text.chat import Chat, Message, cut_chat
from ..text.reading import name_item
from ..text.tokenizer import Tokenizer
from ..text.wording import PLAIN, Wording
from .grammar import Grammars
from .request import GenerationRequest
from .row import Row
from .structure import Structure

log = logging.getLogger("planforge")

Prompt: TypeAlias = str | Sequence[int] | npt.NDArray[np.int64] | npt.NDArray[np.int32]
"""A text, or token ids, which are taken as they are; an array of them has one axis."""


@dataclass(frozen=True)
class RowReader:
    """Makes rows of prompts and conversations that fit the context."""

    tokenizer: Tokenizer
    defaults: GenerationDefaults
    max_length: int  # of the context, in tokens
    vocabulary: int  # how many tokens the model has
    chat: Chat | None  # the bundle's chat template, if it has one
    grammars: Grammars

    def read(self, prompt: Any, request: GenerationRequest, number: int = 0) -> Row:
        """Return the row of a prompt."""
        return self.read_answers(prompt, request, [number])[0]

    def read_chat(self, messages: Sequence[Message], request: GenerationRequest, number: int = 0) -> Row:
        """Return the row of a conversation."""
        return self.read_answers(messages, request, [number], chat=True)[0]

    def read_answers(
        self, prompt: Any, request: GenerationRequest, numbers: Sequence[int], *, chat: bool = False
    ) -> list[Row]:
        """Return a row for each of several answers to one prompt or conversation, which is read once."""
        tokens, cut = self._read_chat(prompt, request) if chat else self._read_prompt(prompt, request)
        begins = chat and not request.continue_final_message  # a chat's answer begins a text
        context = [] if begins else self.tokenizer.find_context(tokens)
        return [self._make_row(tokens, cut, request, number, context) for number in numbers]

    def _read_prompt(self, prompt: Any, request: GenerationRequest) -> tuple[list[int], int]:
        """Return the tokens of a prompt that fit the context, and how many it lost."""
        if request.tools is not None:
            raise InputError(
                "tools are only for conversations: use chat, stream_chat or submit_chat", option="tools"
            )
        for name in ("template_options", "continue_final_message"):
            if getattr(request, name):
                raise InputError(
                    f"{name} is only for conversations: use chat, stream_chat or submit_chat", option=name
                )
        if request.truncation is None and isinstance(prompt, list | tuple):
            self._check_length(len(prompt), request)  # before a million are looked at
        tokens = self.encode_prompt(prompt, request.parse_special)
        return self._fit(tokens, request)

    def read_all(self, prompt: Any, request: GenerationRequest) -> tuple[list[Row], bool]:
        """Return the rows of one prompt, or of several, and whether it is one."""
        check_not_pair(prompt)
        if is_one_prompt(prompt):
            return [self.read(prompt, request)], True
        return [self.read_numbered(number, one, request) for number, one in enumerate(prompt)], False

    def read_numbered(self, number: int, prompt: Any, request: GenerationRequest) -> Row:
        """Return the row of one of several prompts, which errors name."""
        with name_item(f"prompts[{number}]"):
            return self.read(prompt, request, number)

    def read_some(
        self, numbered: Iterable[tuple[int, Prompt]], request: GenerationRequest
    ) -> tuple[list[Row], InputError | None]:
        """Return rows up to the first prompt that cannot be used, and why it cannot."""
        rows: list[Row] = []
        try:
            for number, prompt in numbered:
                rows.append(self.read_numbered(number, prompt, request))
        except InputError as error:
            return rows, error
        return rows, None

    def encode_prompt(self, prompt: Any, parse_special: bool, may_be_empty: bool = False) -> list[int]:
        """Return the tokens of one prompt: a text's behind the prefix, or token ids as they are."""
        tokens = self._encode_own(prompt, parse_special)
        if not tokens and not may_be_empty:
            hint = ""
            if self.defaults.eos:
                eos = self.tokenizer.spell(self.defaults.eos[0])
                hint = f"; to begin from nothing, use {eos!r} with parse_special=True (--parse-special)"
            raise InputError(f"the prompt is empty{hint}", option="prompt")
        prefix = list(self.defaults.prefix)
        if not isinstance(prompt, str) or tokens[: len(prefix)] == prefix:
            return tokens
        return prefix + tokens

    def encode_chat(
        self, messages: Sequence[Message], parse_special: bool, wording: Wording = PLAIN
    ) -> list[int]:
        """Return the tokens of a conversation, up to where the model is to answer."""
        if self.chat is None:
            raise InputError(
                "the bundle has no chat template; use generate() (without --chat), which takes a prompt as it"
                " is, or export again from a folder with chat_template.jinja or chat_template in"
                " tokenizer_config.json"
            )
        return self.chat.encode(messages, self.tokenizer, parse_special, wording)

    def _read_chat(self, messages: Sequence[Message], request: GenerationRequest) -> tuple[list[int], int]:
        """Return the tokens of a conversation that fit the context, and how many it lost.

        Truncation "tail" leaves room for max_new_tokens, half a context at most.
        """

        def encode(messages: Sequence[Message]) -> list[int]:
            return self.encode_chat(messages, request.parse_special, request.wording)

        context = self._find_context(request)
        if request.truncation is None:
            tokens = encode(messages)
            dropped = 0
            what = "the conversation has"
            hint = "Shorten it, or drop its oldest turns by truncation='tail'"
        else:
            cut = cut_chat(messages, encode, self._count_room(request))
            tokens = cut.tokens
            dropped = cut.dropped_tokens
            what = "the last message and the system message have together"
            hint = "Shorten one of them; neither is ever truncated"
            if cut.dropped_messages and len(tokens) < context:
                log.warning(
                    "the conversation has %d tokens; its %d oldest messages were dropped, %d tokens",
                    len(tokens) + dropped,
                    cut.dropped_messages,
                    dropped,
                )
        if len(tokens) >= context:
            raise ContextLengthError(
                f"{what} {len(tokens)} tokens; {self._name_context(context)}, and the answer needs at least"
                f" one. {hint}",
                tokens=len(tokens),
                limit=context - 1,
                option="messages",
            )
        return tokens, dropped

    def find_structure(self, request: GenerationRequest) -> Structure | None:
        """Return what an answer must be; None where it may be anything."""
        if request.tools is not None and request.tools.forced and self.chat is not None:
            return request.tools.write_structure(self.chat.text_for_tools, self.tokenizer)
        return request.structure

    def _encode_own(self, prompt: Any, parse_special: bool) -> list[int]:
        """Return a text's own tokens, or token ids as they are."""
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt, parse_special=parse_special)
        if isinstance(prompt, np.ndarray):
            if prompt.ndim != 1 or not np.issubdtype(prompt.dtype, np.integer):
                raise InputError(
                    f"an array of shape {prompt.shape} and {prompt.dtype} is not a prompt, which must have"
                    " one axis of integers; give several prompts as a list of arrays",
                    option="prompt",
                )
            prompt = prompt.tolist()
        if not isinstance(prompt, Sequence) or isinstance(prompt, bytes | bytearray):
            raise InputError(
                f"a prompt must be a str or a sequence of token ids, not {type(prompt).__name__}",
                option="prompt",
            )
        if set(map(type, prompt)) == {int} and min(prompt) >= 0 and max(prompt) < self.vocabulary:
            return list(prompt)  # a million in the time of which one by one takes a second
        return [self._check_token(token) for token in prompt]

    def _count_room(self, request: GenerationRequest) -> int:
        """Return how many tokens a prompt may have that is cut: the answer gets half a context at most."""
        context = self._find_context(request)
        return context - min(request.max_new_tokens, context // 2)

    def _find_context(self, request: GenerationRequest) -> int:
        """Return how many tokens a prompt and its answer may have together."""
        return min(self.max_length, request.max_length or self.max_length)

    def _fit(self, tokens: list[int], request: GenerationRequest) -> tuple[list[int], int]:
        """Return the prompt, or its end if it is to be cut, and how many tokens were dropped."""
        if request.truncation is None:
            self._check_length(len(tokens), request)
            return tokens, 0
        keep = self._count_room(request)
        if len(tokens) <= keep:
            return tokens, 0
        log.warning("the prompt has %d tokens; its first %d were dropped", len(tokens), len(tokens) - keep)
        prefix = self.defaults.prefix[:keep]
        if tuple(tokens[: len(prefix)]) != prefix:  # token ids may begin without it
            prefix = ()
        return [*prefix, *tokens[len(tokens) - keep + len(prefix) :]], len(tokens) - keep

    def _check_length(self, count: int, request: GenerationRequest) -> None:
        """Refuse a prompt that leaves no room in the context."""
        context = self._find_context(request)
        if count >= context:
            raise ContextLengthError(
                f"the prompt has {count} tokens; {self._name_context(context)}, and the answer needs at least"
                " one. Shorten it, or drop its beginning by truncation='tail' (--truncation tail)",
                tokens=count,
                limit=context - 1,
                option="prompt",
            )

    def _name_context(self, context: int) -> str:
        """Return what a prompt and its answer may have together, and by whom."""
        if context == self.max_length:
            return f"the context holds {context}"
        return f"the checkpoint's max_length is {context} (max_new_tokens overrides it)"

    def _check_token(self, token: Any) -> int:
        if not isinstance(token, Integral) or isinstance(token, bool):
            raise InputError(
                f"a prompt's token ids must be integers, not {type(token).__name__}", option="prompt"
            )
        token_id = int(token)
        if not 0 <= token_id < self.vocabulary:
            raise InputError(
                f"a prompt has the token id {token_id}, but the model's are 0 to {self.vocabulary - 1}; take"
                " the ids from the model's own tokenizer",
                option="prompt",
            )
        return token_id

    def _make_row(
        self,
        tokens: list[int],
        cut: int,
        request: GenerationRequest,
        number: int,
        context: Sequence[int] = (),
    ) -> Row:
        """Return a row; the text of its answer goes on with a context, a conversation's with none."""
        structure = self.find_structure(request)
        return Row(
            tokenizer=self.tokenizer,
            prompt=tokens,
            cut=cut,
            room=self.max_length - len(tokens),
            request=request,
            eos=self.defaults.eos,
            number=number,
            context=context,
            grammar=None if structure is None else self.grammars.start(structure, begins=not context),
        )


def is_one_prompt(prompt: Any) -> bool:
    """Return whether this is one prompt: a text, an array, or a sequence of token ids alone."""
    if isinstance(prompt, str | np.ndarray):
        return True
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes | bytearray):
        hint = "; iterate() takes any iterable of prompts" if hasattr(prompt, "__iter__") else ""
        raise InputError(
            "prompt must be a text, a sequence of token ids, or a sequence of these, not"
            f" {type(prompt).__name__}{hint}"
        )
    return len(prompt) > 0 and all(isinstance(token, Integral) for token in prompt)


def check_several(prompts: Any) -> None:
    """Refuse what is not several prompts."""
    if isinstance(prompts, str | bytes) or not hasattr(prompts, "__iter__"):
        raise InputError(f"iterate takes several prompts, such as a list, not {type(prompts).__name__}")
    check_not_pair(prompts)


def count_vocabulary(artifact: Artifact, tokenizer: Tokenizer) -> int:
    """Return how many tokens the model has; where its graph does not say, as many as its tokenizer."""
    sizes = (spec.axes[-1] for spec in artifact.outputs if spec.role == "logits")
    return next((size for size in sizes if isinstance(size, int)), tokenizer.vocab_size)
