"""Training data of transformer-demo: dates written in many ways, each with its ISO form.

A format is a named template; within it, month names, padding, commas, case and spaces vary at random. Numeric
dates name the day first. Two-digit years are 1969 to 2068, as POSIX reads them.

About one (date, format) pair in 50 is held out: no training text is ever written from it. No two formats can
write the same text, so no training text equals a held-out one.
"""

from __future__ import annotations

import hashlib
import random
import re
import string
from collections.abc import Iterator
from datetime import date, timedelta

# fmt: off
MONTHS = (
    "January", "February", "March", "April", "May", "June",
    "July", "August", "September", "October", "November", "December",
)
WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
UNITS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth")
TEENS = (
    "tenth", "eleventh", "twelfth", "thirteenth", "fourteenth",
    "fifteenth", "sixteenth", "seventeenth", "eighteenth", "nineteenth",
)
# fmt: on
TWENTIES = ("twentieth", *(f"twenty-{unit}" for unit in UNITS))
ORDINALS = (*UNITS, *TEENS, *TWENTIES, "thirtieth", "thirty-first")

# The fields are explained in `fields`.
FORMATS = {
    "iso": "{Y}-{m}-{d}",
    "year-slashes": "{Y}/{m}/{d}",
    "year-dots": "{Y}.{m}.{d}",
    "compact": "{Y}{mm}{dd}",
    "slashes": "{d}/{m}/{Y}",
    "slashes-short": "{d}/{m}/{y}",
    "dots": "{d}.{m}.{Y}",
    "dots-short": "{d}.{m}.{y}",
    "dashes": "{d}-{m}-{Y}",
    "dashes-short": "{d}-{m}-{y}",
    "spaces": "{d} {m} {Y}",
    "spaces-short": "{d} {m} {y}",
    "day-month-year": "{d} {month}{comma}{Y}",
    "day-month-short": "{d} {month} {y}",
    "day-month-apostrophe": "{d} {month} {apostrophe}{y}",
    "dashed-month": "{d}-{name}-{Y}",
    "dashed-month-short": "{d}-{name}-{y}",
    "month-day-year": "{month} {d}{comma}{Y}",
    "month-day-short": "{month} {d}{comma}{y}",
    "month-day-apostrophe": "{month} {d}{comma}{apostrophe}{y}",
    "month-ordinal": "{month} {th}{comma}{Y}",
    "month-ordinal-short": "{month} {th}{comma}{y}",
    "month-the-ordinal": "{month} the {th}{comma}{Y}",
    "month-word": "{month} {word}{comma}{Y}",
    "ordinal-month": "{th} {month}{comma}{Y}",
    "ordinal-month-short": "{th} {month} {y}",
    "ordinal-of-month": "{the}{th} of {month}{comma}{Y}",
    "ordinal-of-month-short": "{the}{th} of {month}{comma}{apostrophe}{y}",
    "word-of-month": "{the}{word} of {month}{comma}{Y}",
    "word-of-month-short": "{the}{word} of {month}{comma}{apostrophe}{y}",
    "year-month-day": "{Y} {month} {d}",
    "year-dashed-month": "{Y}-{name}-{d}",
    "weekday-day-month": "{weekday}{comma}{d} {month} {Y}",
    "weekday-month-day": "{weekday}{comma}{month} {d}{comma}{Y}",
    "weekday-ordinal": "{weekday}{comma}the {th} of {month}{comma}{Y}",
    "weekday-word": "{weekday}{comma}the {word} of {month} {Y}",
    "day-abbreviated": "{wkd}{comma}{d} {month} {Y}",
    "day-abbreviated-short": "{wkd}{comma}{d} {month} {y}",
    "day-abbreviated-slashes": "{wkd} {d}/{m}/{Y}",
}

ALL_YEARS = (date(1000, 1, 1), date(2999, 12, 31))
USUAL_YEARS = (date(1900, 1, 1), date(2068, 12, 31))
SHORT_YEARS = (date(1969, 1, 1), date(2068, 12, 31))
LARGEST_SAMPLE = 500  # two-digit years have some 730 held-out dates
USUAL = 0.7  # of the training dates with four-digit years are of the usual years
SEPARATOR = re.compile(r"(?<=\d)[-/.](?=\d)")


def has_short_year(format_name: str) -> bool:
    """Tell whether a format writes two digits of the year."""
    return "{y}" in FORMATS[format_name]


def held_out(day: date, format_name: str) -> bool:
    """Tell whether this date in this format is kept from the training; the same on every machine."""
    digest = hashlib.sha256(f"{day.isoformat()} {format_name}".encode()).digest()
    return int.from_bytes(digest[:8], "big") % 50 == 0


def write(day: date, format_name: str, rng: random.Random) -> str:
    """Write a date in a format, whose details vary at random.

    Raises:
        ValueError: the year does not fit the format.
    """
    first, last = SHORT_YEARS if has_short_year(format_name) else ALL_YEARS
    if not first <= day <= last:
        raise ValueError(
            f"{format_name} writes dates of the years {first.year} to {last.year}, not {day.isoformat()}"
        )
    text = FORMATS[format_name].format_map(fields(day, rng))
    return with_case(with_spaces(text, rng), rng)


def fields(day: date, rng: random.Random) -> dict[str, str]:
    """Return the values of a template's fields."""
    weekday = WEEKDAYS[day.weekday()]
    return {
        "Y": f"{day.year}",
        "y": f"{day.year % 100:02}",
        "mm": f"{day.month:02}",
        "dd": f"{day.day:02}",
        "m": f"{day.month:{rng.choice(('', '02'))}}",
        "d": f"{day.day:{rng.choice(('', '02'))}}",
        "th": f"{day.day}{ordinal_ending(day.day)}",
        "word": ORDINALS[day.day - 1].replace("-", rng.choice("--- ")),
        "month": month_name(day.month, rng, dots=True),
        "name": month_name(day.month, rng, dots=False),  # between dashes
        "weekday": weekday,
        "wkd": weekday[:3] + rng.choice(("", "", "", ".")),
        "the": rng.choice(("the ", "the ", "")),
        "comma": rng.choices((", ", " ", ","), (10, 9, 1))[0],
        "apostrophe": rng.choice("''\N{RIGHT SINGLE QUOTATION MARK}"),
    }


def ordinal_ending(number: int) -> str:
    """Return the letters after 1 in 1st, after 2 in 2nd, and so on."""
    if number in (11, 12, 13):
        return "th"
    return {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")


def month_name(month: int, rng: random.Random, dots: bool) -> str:
    """Return a month's name in full, or abbreviated with or without a dot."""
    name = MONTHS[month - 1]
    if rng.random() < 0.55:
        return name
    short = rng.choice(("Sep", "Sept")) if name == "September" else name[:3]
    # "May." would be no abbreviation, but is written all the same.
    return short + "." if dots and rng.random() < 0.4 else short


def with_spaces(text: str, rng: random.Random) -> str:
    """Add superfluous spaces at random."""
    if rng.random() < 0.04:
        text = SEPARATOR.sub(r" \g<0> ", text)
    if rng.random() < 0.04:
        text = text.replace(" ", "  ")
    return text


def with_case(text: str, rng: random.Random) -> str:
    """Return most texts unchanged, the others in lower, upper or title case."""
    draw = rng.random()
    if draw < 0.6:
        return text
    if draw < 0.8:
        return text.lower()
    return text.upper() if draw < 0.95 else string.capwords(text, " ")


def random_date(format_name: str, rng: random.Random) -> date:
    """Return a random date that the format can write; more often one of the usual years."""
    if has_short_year(format_name):
        first, last = SHORT_YEARS
    else:
        first, last = USUAL_YEARS if rng.random() < USUAL else ALL_YEARS
    return first + timedelta(days=rng.randrange((last - first).days + 1))


def training_pairs(seed: int) -> Iterator[tuple[str, str]]:
    """Yield texts and their ISO forms without end; none is of a held-out pair."""
    rng = random.Random(seed)
    names = list(FORMATS)
    while True:
        name = rng.choice(names)
        day = random_date(name, rng)
        if not held_out(day, name):
            yield write(day, name, rng), day.isoformat()


def held_out_sample(format_name: str, count: int, seed: int) -> list[tuple[str, str]]:
    """Return texts of held-out dates of one format, all different, with their ISO forms.

    Raises:
        ValueError: there may not be that many dates.
    """
    if count > LARGEST_SAMPLE:
        raise ValueError(f"count={count} is more than {LARGEST_SAMPLE}")
    rng = random.Random(f"{seed} {format_name}")
    days: dict[date, None] = {}  # a set that keeps its order
    while len(days) < count:
        day = random_date(format_name, rng)
        if held_out(day, format_name):
            days[day] = None
    return [(write(day, format_name, rng), day.isoformat()) for day in days]
