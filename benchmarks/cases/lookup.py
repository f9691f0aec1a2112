"""Prompt-lookup speculation on gpt2-demo, which is trained: text that repeats itself, and text that does not.

gpt2-demo goes on with the King James Bible, whose text is in the public domain.
"""

from __future__ import annotations

from pathlib import Path

from ..case import Case, Entry, Target, Work

NEW = 64
# Numbers 7: each prince brings the same, one after the other, as lines of code or a list repeat.
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


def case(name: str, title: str, text: str, targets: tuple[Target, ...] = ()) -> Case:
    entries = {}
    for precision in ("fp32", "int8"):
        for label, options in (("plain", {}), ("prompt-lookup", {"speculative": "prompt-lookup"})):
            work = Work("generate", (text,), new_tokens=NEW, options=options)
            entries[f"{precision} {label}"] = Entry("planforge", precision, "gpt2-demo", work, label=label)
    varies = {"precision": "each precision is compared with itself"}
    return Case(name, "lookup", f"gpt2-demo, {title}: new tokens/s", entries, varies=varies, targets=targets)


def cases(work: Path) -> list[Case]:
    targets = tuple(
        Target(f"{precision} prompt-lookup", f"{precision} plain", "per_s", 1.8)
        for precision in ("fp32", "int8")
    )
    return [
        case("lookup-list", "a list of nearly equal entries", LIST + "One golden", targets),
        case("lookup-refrain", "verses with a refrain", REFRAIN, targets),
        case("lookup-prose", "text that does not repeat itself", PROSE),
    ]
