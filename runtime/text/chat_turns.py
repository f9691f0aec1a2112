"""Cuts a conversation that is too long: its oldest turns go, and what the system said stays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .chat import Message

SYSTEM = ("system", "developer")  # roles whose messages are never dropped


@dataclass(frozen=True)
class CutChat:
    """A conversation as far as it fits."""

    tokens: list[int]  # of the messages that are left
    dropped_messages: int
    dropped_tokens: int  # by how many the conversation became shorter


def cut_chat(
    messages: Sequence[Message], encode: Callable[[Sequence[Message]], list[int]], limit: int
) -> CutChat:
    """Drop as few of a conversation's oldest turns as make it fit in `limit` tokens.

    A turn is a user's message and all that follows until the next user's. The last turn stays, and so do
    the system's messages, whether or not what is left fits.
    """
    whole = encode(messages)
    turns = split_turns(messages)
    if len(whole) <= limit or len(turns) < 2:
        return CutChat(whole, 0, 0)

    def encode_without(count: int) -> list[int]:
        dropped = {index for turn in turns[:count] for index in turn}
        return encode([message for index, message in enumerate(messages) if index not in dropped])

    fewest = 1
    most = len(turns) - 1
    while fewest < most:  # a conversation that lost more turns is shorter
        middle = (fewest + most) // 2
        if len(encode_without(middle)) <= limit:
            most = middle
        else:
            fewest = middle + 1
    tokens = encode_without(fewest)
    return CutChat(tokens, sum(map(len, turns[:fewest])), len(whole) - len(tokens))


def split_turns(messages: Sequence[Message]) -> list[list[int]]:
    """Return the places of the messages of each turn, without the system's.

    What is said before the first user's message is a turn of its own.
    """
    turns: list[list[int]] = []
    for index, message in enumerate(messages):
        role = message["role"]
        if role in SYSTEM:
            continue
        if role == "user" or not turns:
            turns.append([])
        turns[-1].append(index)
    return turns
