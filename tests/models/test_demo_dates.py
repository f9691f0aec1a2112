"""The demos that read dates: made-up dates mean what they say, and the models read held-out ones."""

from __future__ import annotations

import json
import random
import re
from datetime import date, datetime
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from planforge.exporter.checkpoints.source import DEMOS
from planforge.models import load_model
from planforge.models.demos import dates
from planforge.models.demos.dates import FORMATS, held_out, held_out_sample, training_pairs, write
from planforge.models.demos.train_recurrent_demo import RecurrentDateModel
from planforge.models.demos.train_transformer_demo import (
    MAX_POSITIONS,
    PROMPT_FORMATS,
    SEED,
    DateModel,
    source_tokenizer,
    target_tokenizer,
)

MODELS: dict[str, type[DateModel]] = {"transformer-demo": DateModel, "recurrent-demo": RecurrentDateModel}
MOST_BYTES = {"transformer-demo": 4_000_000, "recurrent-demo": 2_000_000}

# What Python's own reader makes of each format, once `plain` has taken the words and the dots away.
PATTERNS = {
    "iso": "%Y-%m-%d",
    "year-slashes": "%Y/%m/%d",
    "year-dots": "%Y.%m.%d",
    "compact": "%Y%m%d",
    "slashes": "%d/%m/%Y",
    "slashes-short": "%d/%m/%y",
    "dots": "%d.%m.%Y",
    "dots-short": "%d.%m.%y",
    "dashes": "%d-%m-%Y",
    "dashes-short": "%d-%m-%y",
    "spaces": "%d %m %Y",
    "spaces-short": "%d %m %y",
    "day-month-year": "%d %b %Y",
    "day-month-short": "%d %b %y",
    "day-month-apostrophe": "%d %b '%y",
    "dashed-month": "%d-%b-%Y",
    "dashed-month-short": "%d-%b-%y",
    "month-day-year": "%b %d %Y",
    "month-day-short": "%b %d %y",
    "month-day-apostrophe": "%b %d '%y",
    "month-ordinal": "%b %dth %Y",
    "month-ordinal-short": "%b %dth %y",
    "month-the-ordinal": "%b the %dth %Y",
    "month-word": "%b %d %Y",
    "ordinal-month": "%dth %b %Y",
    "ordinal-month-short": "%dth %b %y",
    "ordinal-of-month": "%dth of %b %Y",
    "ordinal-of-month-short": "%dth of %b '%y",
    "word-of-month": "%d of %b %Y",
    "word-of-month-short": "%d of %b '%y",
    "year-month-day": "%Y %b %d",
    "year-dashed-month": "%Y-%b-%d",
    "weekday-day-month": "%A %d %b %Y",
    "weekday-month-day": "%A %b %d %Y",
    "weekday-ordinal": "%A the %dth of %b %Y",
    "weekday-word": "%A the %d of %b %Y",
    "day-abbreviated": "%a %d %b %Y",
    "day-abbreviated-short": "%a %d %b %y",
    "day-abbreviated-slashes": "%a %d/%m/%Y",
}
WORDS = re.findall(
    r"\w+",
    "first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth thirteenth fourteenth"
    " fifteenth sixteenth seventeenth eighteenth nineteenth twentieth",
)
NUMBERS = {word: number for number, word in enumerate(WORDS, start=1)} | {"thirtieth": 30}
TENS = {"twenty": 20, "thirty": 30}
ENDINGS = {1: "st", 2: "nd", 3: "rd", 21: "st", 22: "nd", 23: "rd", 31: "st"}


def plain(text: str) -> str:
    """The text with numbers for words, "th" for every ending, and three letters for each month."""
    text = " ".join(text.lower().replace("’", "'").replace(",", " ").split())
    text = re.sub(r"(?<=[a-z])\.", "", text)
    text = re.sub(r"(?<=\d) ([-/.]) (?=\d)", r"\1", text)
    text = re.sub(r"(twenty|thirty)[- ](\w+)", lambda m: str(TENS[m[1]] + NUMBERS[m[2]]), text)
    text = re.sub(r"[a-z]+th\b|first|second|third", lambda m: str(NUMBERS.get(m[0], m[0])), text)
    for number, ending in re.findall(r"(\d+)(st|nd|rd|th)\b", text):
        assert ending == ENDINGS.get(int(number), "th")
    text = re.sub(r"(?<=\d)(st|nd|rd|th)\b", "th", text)
    text = re.sub(r"\b(jan|feb|mar|apr|jun|jul|aug|sep|oct|nov|dec)[a-z]*", r"\1", text)
    return text.removeprefix("the ")


def read(text: str, format_name: str) -> date:
    return datetime.strptime(plain(text), PATTERNS[format_name]).date()


@st.composite
def written_dates(draw: st.DrawFn) -> tuple[date, str]:
    name = draw(st.sampled_from(list(FORMATS)))
    short = "%y" in PATTERNS[name]
    first, last = (date(1969, 1, 1), date(2068, 12, 31)) if short else (date(1000, 1, 1), date(2999, 12, 31))
    return draw(st.dates(first, last)), name


@given(written=written_dates(), seed=st.integers(0, 2**32))
def test_a_written_date_is_read_back(written: tuple[date, str], seed: int) -> None:
    day, name = written
    assert read(write(day, name, random.Random(seed)), name) == day


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_is_read_back(name: str) -> None:
    for text, iso in held_out_sample(name, 100, seed=1):
        assert read(text, name).isoformat() == iso


def test_there_is_a_pattern_for_each_format() -> None:
    assert list(PATTERNS) == list(FORMATS)


@pytest.mark.parametrize("name", [name for name, pattern in PATTERNS.items() if "%a" in pattern.lower()])
def test_weekdays_are_true(name: str) -> None:
    for text, iso in held_out_sample(name, 50, seed=2):
        full = date.fromisoformat(iso).strftime("%A").lower()
        assert re.findall("[a-z]+", text.lower())[0] == (full if "%A" in PATTERNS[name] else full[:3])


def test_two_digits_of_a_year_are_1969_to_2068() -> None:
    rng = random.Random(0)
    assert write(date(1969, 12, 31), "slashes-short", rng).endswith("/69")
    assert write(date(2068, 12, 31), "slashes-short", rng).endswith("/68")
    for day in (date(1968, 12, 31), date(2069, 1, 1)):
        with pytest.raises(ValueError, match="slashes-short writes dates of the years 1969 to 2068, not"):
            write(day, "slashes-short", rng)
    with pytest.raises(ValueError, match="not 0999-12-31"):
        write(date(999, 12, 31), "iso", rng)


def test_held_out_pairs_are_the_same_everywhere() -> None:
    year = [date.fromordinal(date(1998, 1, 1).toordinal() + i) for i in range(365)]
    assert [f"{day:%m-%d}" for day in year if held_out(day, "iso")] == [
        "01-14",
        "05-17",
        "09-15",
        "11-14",
        "12-15",
    ]
    share = sum(held_out(day, name) for day in year for name in FORMATS) / (len(year) * len(FORMATS))
    assert 0.018 < share < 0.022


def test_a_sample_is_of_different_dates_as_many_as_there_are() -> None:
    assert len({iso for _, iso in held_out_sample("dots-short", 500, seed=0)}) == 500
    with pytest.raises(ValueError, match="count=501 is more than 500"):
        held_out_sample("dots-short", 501, seed=0)


def test_training_never_writes_a_held_out_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    used = set()

    def watched(day: date, name: str, rng: random.Random) -> str:
        used.add((day, name))
        return write(day, name, rng)

    monkeypatch.setattr(dates, "write", watched)
    pairs = list(islice(training_pairs(seed=3), 20_000))
    assert len(used) > 15_000
    assert not [pair for pair in used if held_out(*pair)]
    texts = {text for text, _ in pairs}
    assert not texts & {text for name in FORMATS for text, _ in held_out_sample(name, 200, seed=4)}
    assert pairs == list(islice(training_pairs(seed=3), 20_000))


def test_no_two_formats_write_the_same_text() -> None:
    rng = random.Random(5)
    normalizer = source_tokenizer().normalizer
    assert normalizer is not None
    writers: dict[str, set[str]] = {}
    for day in (date(1998, 5, 3), date(2011, 9, 21), date(2012, 12, 12)):
        for name in FORMATS:
            for _ in range(200):
                writers.setdefault(normalizer.normalize_str(write(day, name, rng)), set()).add(name)
    assert not {text: names for text, names in writers.items() if len(names) > 1}


def test_texts_fit_into_the_model() -> None:
    longest = max((text for text, _ in islice(training_pairs(seed=6), 20_000)), key=len)
    assert len(longest) + 1 < MAX_POSITIONS  # and the end


def test_the_source_is_read_without_regard_to_case_space_and_typography() -> None:
    tokenizer = source_tokenizer()
    wanted = tokenizer.encode("3 may '98").ids
    for text in ("3 May '98", "  3\tMAY\n\u2019\uff19\uff18 ", "3\u00a0May `98"):
        assert tokenizer.encode(text).ids == wanted, text
    assert tokenizer.encode("3\u20135\u201398").ids == tokenizer.encode("3-5-98").ids
    assert tokenizer.encode("3 M\u00e9").tokens == ["3", " ", "m", "<unk>", "</s>"]


def test_the_target_is_written_without_special_tokens() -> None:
    tokenizer = target_tokenizer()
    encoding = tokenizer.encode("1998-05-03")
    assert encoding.tokens == [*"1998-05-03", "</s>"]
    assert tokenizer.decode([0, *encoding.ids]) == "1998-05-03"
    assert tokenizer.encode("1a").tokens == ["1", "<unk>", "</s>"]


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest) -> Path:
    return DEMOS / str(request.param)


@pytest.fixture(scope="module")
def demo(folder: Path) -> DateModel:
    model: Any = load_model(folder)
    source, target = (
        Tokenizer.from_file(str(folder / f"tokenizer.{side}.json")) for side in ("source", "target")
    )
    return MODELS[folder.name](model, source, target)


def test_the_trained_model_reads_held_out_dates(demo: DateModel) -> None:
    sample = [pair for name in FORMATS for pair in held_out_sample(name, 20, seed=7)]
    texts, wanted = zip(*sample, strict=True)
    wrong = [row for row in zip(texts, wanted, demo.answers(texts), strict=True) if row[1] != row[2]]
    assert len(wrong) <= 0.005 * len(sample), wrong


def test_the_folder_is_what_the_script_writes(demo: DateModel, folder: Path) -> None:
    assert demo.source.to_str() == source_tokenizer().to_str()
    assert demo.target.to_str() == target_tokenizer().to_str()
    wanted = "".join(held_out_sample(name, 1, SEED)[0][0] + "\n" for name in PROMPT_FORMATS)
    assert (folder / "prompts.txt").read_text(encoding="utf-8") == wanted
    assert sum(path.stat().st_size for path in folder.iterdir()) <= MOST_BYTES[folder.name]


def test_the_recorded_figures_are_of_all_formats(folder: Path) -> None:
    held_out_figures = json.loads(Path(folder, "training.json").read_text(encoding="utf-8"))["held_out"]
    by_format = held_out_figures["exact_match_by_format"]
    assert list(by_format) == list(FORMATS)
    assert held_out_figures["exact_match"] == pytest.approx(
        sum(by_format.values()) / len(by_format), abs=1e-5
    )
    assert held_out_figures["exact_match"] >= 0.998
