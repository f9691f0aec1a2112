"""Figures and pictures of a verification's report: short, marked where they are bad, and true to scale."""

from __future__ import annotations

import math
import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planforge.exporter.reports.charts import draw_histogram, draw_line_charts
from planforge.exporter.reports.html import render_html
from planforge.exporter.reports.tables import (
    COLUMNS,
    describe_nodes_in_fp32,
    format_figure,
    format_percent,
    make_cell,
)
from planforge.exporter.verification.fp32_nodes import Fp32Node
from planforge.exporter.verification.report import VerificationReport

from ...helpers.reports import KEPT, SUBJECT, Page, comparison


def test_figures_are_short() -> None:
    assert [format_figure(x) for x in (0, 4.891e-6, 0.0123456, 1, 3060, 1.1e5, 1e12)] == [
        *("0", "4.89e-6", "0.0123", "1", "3060", "110000", "1e12"),
    ]
    shares = [
        format_percent(x).replace("\N{NO-BREAK SPACE}", " ") for x in (0, 1e-9, 0.0033, 0.9957, 1 - 1e-9, 1)
    ]
    assert shares == ["0 %", "<0.01 %", "0.33 %", "99.57 %", ">99.99 %", "100 %"]


@pytest.mark.parametrize(
    ("value", "state"), [(0.05, ""), (0.081, "near"), (0.1, "near"), (0.1001, "over"), (None, "over")]
)
def test_a_figure_near_or_over_its_limit_is_marked(value: float | None, state: str) -> None:
    found = comparison(metrics={"max_error": value})
    cell = make_cell(found, COLUMNS[0])
    assert (cell.state, cell.limit) == (state, "≤ 0.1")
    html = render_html(VerificationReport(True, (found,)), SUBJECT)
    marks = {"": "", "near": "▲ near its limit: ", "over": "✕ over its limit: "}
    assert f"{marks[state]}{cell.text} ≤ 0.1" in Page(html).text


def test_of_several_outputs_the_worst_counts() -> None:
    found = comparison(
        metrics={"states.max_error": 0.9, "logits.max_error": 0.2, "logits.top1_agreement": 0.7},
        limits={"states.max_error": 1.0, "logits.max_error": 0.1},
    )
    assert make_cell(found, COLUMNS[0]).text == "0.2"  # twice its limit; 0.9 is inside its own
    assert make_cell(found, COLUMNS[0], "states").state == "near"
    page = Page(render_html(VerificationReport(True, (found,)), SUBJECT)).text
    assert "Each output by itself" in page and "max error of logits" in page


def test_changes_of_the_likeliest_token_are_shown_as_agreement() -> None:
    found = comparison(metrics={"top1_changes": 0.012}, limits={"top1_changes": 0.02})
    cell = make_cell(found, next(c for c in COLUMNS if c.title == "top-1"))
    assert (cell.text, cell.limit) == ("98.8\N{NO-BREAK SPACE}%", "≥ 98\N{NO-BREAK SPACE}%")
    assert cell.share == pytest.approx(0.6)


def test_errors_are_drawn_on_a_logarithmic_scale() -> None:
    errors = {"decoder.ort.fp32": (1e-6, 1e-5, 1e-4), "decoder.ort.int8": (0.01, math.nan, 0.01)}
    found = [comparison(name, errors=values) for name, values in errors.items()]
    precisions = {"decoder.ort.fp32": "fp32", "decoder.ort.int8": "int8"}
    (chart,) = draw_line_charts([*found, comparison(case="without steps")], precisions)
    lines = {line.label: line for line in chart.lines}
    points = [tuple(map(float, p.split())) for p in lines["decoder.ort.fp32"].paths[0][1:].split(" L")]
    (x0, y0), (x1, y1), (x2, y2) = points
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2)
    assert y0 - y1 == pytest.approx(y1 - y2, abs=0.2)  # a decade each
    assert y0 == chart.box.bottom and y1 < y0
    broken = lines["decoder.ort.int8"]
    assert len(broken.paths) == 2 and broken.broken == (x1,)
    decades = dict((label, y) for y, label in chart.rows)
    assert [(limit.y, limit.label) for limit in chart.limits] == [
        (decades["10⁻¹"], "limit of fp32: 0.1"),
        (decades["10⁻¹"], "limit of int8: 0.1"),
    ]
    assert abs(chart.limits[0].label_y - chart.limits[1].label_y) >= 14
    assert lines["decoder.ort.fp32"].tone != broken.tone


@given(st.lists(st.lists(st.floats(0) | st.just(math.nan), min_size=1, max_size=4), min_size=1, max_size=20))
def test_any_errors_can_be_drawn_inside_the_plot_with_labels_apart(errors: list[list[float]]) -> None:
    found = [comparison(f"decoder.ort.{i}", errors=tuple(values)) for i, values in enumerate(errors)]
    (chart,) = draw_line_charts(found, {})
    numbers = [
        float(n)
        for line in chart.lines
        for path in line.paths
        for n in re.findall(r"[\d.]+", path.removesuffix(" h0"))
    ]
    assert all(chart.box.left <= x <= chart.box.right for x in numbers[::2])
    assert all(chart.box.top <= y <= chart.box.bottom for y in numbers[1::2])
    places = sorted(line.label_y for line in chart.lines)
    assert all(b - a >= 13.9 for a, b in pairwise(places))
    assert places[0] >= chart.box.top - 0.1 and places[-1] <= chart.box.bottom


def test_the_histogram_counts_by_powers_of_two() -> None:
    nodes = [
        Fp32Node("n", "Add", "", "sums", low, high) for low, high in ((-16, 3), (0, 31), (0, 32), (-1e5, 0))
    ]
    picture = draw_histogram(nodes)
    assert [(bar.count, bar.beyond) for bar in picture.bars] == [(2, False), (1, False), (1, True)]
    assert picture.bars[0].height == 2 * picture.bars[1].height
    powers = {label: x for x, label in picture.powers}
    assert powers["2⁴"] < picture.bars[0].x < powers["2⁴"] + 2
    assert picture.bars[1].x - picture.bars[0].x == pytest.approx((powers["2⁸"] - powers["2⁴"]) / 4, abs=0.2)
    assert picture.largest == pytest.approx(powers["2¹⁶"], abs=0.2)
    assert picture.bars[2].x > picture.largest


def test_counts_of_the_histogram_do_not_touch_each_other() -> None:
    nodes = [Fp32Node("n", "Add", "", "sums", 0, 2.0**power) for power in range(-24, 41) for _ in range(120)]
    labelled = [bar for bar in draw_histogram(nodes).bars if bar.label]
    assert 1 < len(labelled) < 65 and {bar.label for bar in labelled} == {"120"}
    assert all(b.x - a.x >= 3 * 7 for a, b in pairwise(labelled))


@given(st.lists(st.floats(), min_size=1))
def test_any_magnitude_has_a_place_in_the_histogram(values: list[float]) -> None:
    picture = draw_histogram([Fp32Node("n", "Add", "", "sums", value, value) for value in values])
    assert sum(bar.count for bar in picture.bars) == len(values)
    for bar in picture.bars:
        assert picture.box.left <= bar.x and bar.x + bar.width <= picture.box.right + 0.2


def test_what_stays_in_fp32_is_told_in_a_line() -> None:
    assert describe_nodes_in_fp32("fp16", KEPT) == (
        "fp16: 9 LayerNormalization (sums squares), 4 Softmax (sums exponentials), 2 Add (reaches 1.1e+05),"
        " 1 MatMul (reaches 4e+04, so scaled by 2^-1)"
    )
    unread = "reads what fp16 cannot hold"
    reading = [
        Fp32Node(f"n{i}", "Mul", "", f"reads v{i}, which fp16 cannot hold", 0, 1, unread) for i in range(3)
    ]
    assert describe_nodes_in_fp32("fp16", reading) == "fp16: 3 Mul (reads what fp16 cannot hold)"
