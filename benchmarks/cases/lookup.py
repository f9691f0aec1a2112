"""Prompt-lookup speculation: code that is edited, text that repeats itself, and text that does not.

Edits and a summary are dictated to a random GPT-2 of the 124M shape, for no model here could write them: it
computes every step, and then the known text's next token is taken. The targets are for that shape. gpt2-demo
is trained, and goes on with the King James Bible, whose text is in the public domain; a step of so small a
model costs little more than the Python around it, so there is less to save.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ..case import Case, Entry, Target, Work
from ..texts import rewrites

NEW = 64
# Numbers 7: each prince brings the same, one after the other, as entries of a list repeat.
LIST = 3 * (
    "One golden spoon of ten shekels, full of incense: One young bullock, one ram, one lamb of the first"
    " year, for a burnt offering: One kid of the goats for a sin offering: "
)
# Psalm 136: new words between a refrain.
REFRAIN = (
    "O give thanks unto the LORD; for he is good: for his mercy endureth for ever. O give thanks unto the"
    " God of gods: for his mercy endureth for ever. O give thanks to the Lord of lords: for his mercy"
    " endureth for ever. To him who alone doeth great wonders: for his mercy endureth for ever. To him that"
    " by wisdom made the heavens:"
)
PROSE = "Now therefore"
PRECISIONS = ("fp32", "int8")
TARGETS = tuple(Target(f"{name} prompt-lookup", f"{name} plain", "per_s", 1.8) for name in PRECISIONS)


def case(
    name: str, title: str, checkpoint: str, work: Work, targets: tuple[Target, ...] = (), rounds: int = 99
) -> Case:
    entries = {}
    for precision in PRECISIONS:
        for label, options in (("plain", {}), ("prompt-lookup", {"speculative": "prompt-lookup"})):
            asked = replace(work, options=options)
            entries[f"{precision} {label}"] = Entry("planforge", precision, checkpoint, asked, label=label)
    varies = {"precision": "each precision is compared with itself"}
    title = f"{title}: new tokens/s"
    return Case(name, "lookup", title, entries, varies=varies, targets=targets, rounds=rounds)


def cases(work: Path) -> list[Case]:
    dictated = [
        case(
            f"lookup-dictated-{i}",
            f"forced to write {each.what}",
            "gpt2-124m",
            Work("generate", (each.prompt,), new_tokens=each.tokens, dictated=each.after),
            TARGETS,
            rounds=3,
        )
        for i, each in enumerate(rewrites(), 1)
    ]

    def demo(text: str) -> Work:
        return Work("generate", (text,), new_tokens=NEW)

    return [
        *dictated,
        case("lookup-list", "a list of nearly equal entries", "gpt2-demo", demo(LIST + "One golden")),
        case("lookup-refrain", "verses with a refrain", "gpt2-demo", demo(REFRAIN)),
        case("lookup-prose", "text that does not repeat itself", "gpt2-demo", demo(PROSE)),
    ]
