"""`planforge run --chat`: texts as a user's messages, and a model's answers."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any

from ...errors import InputError
from .console import emit, format_json, say
from .run_input import Item, TextSource
from .run_options import FLAGS

if TYPE_CHECKING:
    from ... import TextGenerator

YOU = "you> "
MODEL = "model> "
RESET = "/reset"
EXIT = "/exit"


def converse(
    model: TextGenerator,
    source: TextSource,
    options: dict[str, Any],
    system: str | None,
    continue_from: str | None,
    as_json: bool,
) -> None:
    """Answer each message, printing the answer as it comes.

    Lines of stdin are turns of one conversation, in which /reset begins anew and /exit ends; other messages
    begin their own. On a terminal both speakers are named, and a message that cannot be answered does not
    end the conversation. With `continue_from` every answer begins with it, and the model goes on.
    """
    start = [] if continue_from is None else [make_message("assistant", continue_from)]
    options["continue_final_message"] = bool(start)
    begin = [] if system is None else [make_message("system", system)]
    messages = list(begin)
    is_one = source.is_read and source.file is None
    is_talk = source.is_typed and sys.stdout.isatty() and not as_json
    if is_one:
        options["reuse_prompt"] = True
    for text in read_typed_messages() if is_talk else source.read_items():
        if text is None:  # a line for each line, so that those of both sides belong together
            emit("null" if as_json else "")
        elif is_one and text == EXIT:
            break
        elif is_one and text == RESET:
            messages = list(begin)
            say("a new conversation")
        else:
            if not isinstance(text, str):
                raise InputError("--chat takes messages, not pairs of texts")
            asked = [*(messages if is_one else begin), make_message("user", text)]
            try:
                with speaking_of_flags():
                    reply = answer(model, [*asked, *start], options, as_json, is_talk)
                messages = [*asked, make_message("assistant", reply)]
            except InputError as error:
                if not is_talk:
                    raise
                say(f"error: {error}")


@contextlib.contextmanager
def speaking_of_flags() -> Iterator[None]:
    """Let errors name the command's options, where those of the runtime name parameters."""
    try:
        yield
    except InputError as error:
        if error.option not in FLAGS:
            raise
        message = str(error).replace(error.option, FLAGS[error.option])
        raise InputError(message, option=error.option) from error


def answer(
    model: TextGenerator,
    messages: list[dict[str, str]],
    options: dict[str, Any],
    as_json: bool,
    is_talk: bool,
) -> str:
    """Show the answer to the last user's message, and return its text, with what it was to begin with."""
    begin = [messages[-1]["content"]] if options["continue_final_message"] else []
    if as_json:
        result = model.chat(messages, **options)
        emit(format_json({"prompt": messages[-1 - len(begin)]["content"], **result.to_json()}))
        return "".join([*begin, result.text])
    chunks = model.stream_chat(messages, **options)  # checks everything before anything shows
    if is_talk:
        emit(MODEL, end="")
    pieces = []
    for piece in chain(begin, map(str, chunks)):
        emit(piece, end="")
        pieces.append(piece)
    emit("")
    return "".join(pieces)


def read_typed_messages() -> Iterator[Item]:
    """Yield what is typed behind a prompt sign, until Ctrl-D or /exit; blank lines are passed over."""
    with contextlib.suppress(ImportError):  # Windows has no readline, but its own editing
        import readline  # noqa: F401  (arrow keys, and what was typed before)
    say(f"{RESET} begins anew, {EXIT} or Ctrl-D ends")
    while True:
        try:
            text = input(YOU)
        except EOFError:
            emit("")
            return
        if text.strip():
            yield text.strip()


def make_message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}
