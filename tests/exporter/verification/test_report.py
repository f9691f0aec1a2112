"""What people and CI read of a verification: a page, which a browser shows, JUnit XML, a terminal's table."""

from __future__ import annotations

import dataclasses
import functools
import re
import subprocess
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from rich.console import Console
from typer.testing import CliRunner

from planforge.exporter.commands.app import app
from planforge.exporter.errors import OutputError, VerificationError
from planforge.exporter.reports.html import Subject, render_html
from planforge.exporter.reports.junit import render_junit
from planforge.exporter.reports.output import check_writable, make_printable, write_whole
from planforge.exporter.reports.tables import make_tables
from planforge.exporter.verification import verify as verify_module
from planforge.exporter.verification.report import VerificationReport

from ...helpers.browser import find_browser
from ...helpers.cli import error_line
from ...helpers.reports import SUBJECT, Page, demo_report, failed_report, passed_report

# ---- the page


def test_the_verdict_says_how_many_and_with_what() -> None:
    page = Page(render_html(passed_report(), SUBJECT)).text
    assert "Passed 2 comparisons with PyTorch, all within their limits." in page
    golden = dataclasses.replace(passed_report(), with_pytorch=False)
    assert "with golden data, without PyTorch, all within" in Page(render_html(golden, SUBJECT)).text
    page = Page(render_html(failed_report(), SUBJECT)).text
    assert "FAILED 1 of 3 comparisons with PyTorch went wrong, in decoder.ort.fp16." in page
    nothing = Page(render_html(VerificationReport(True, ()), SUBJECT)).text
    assert "FAILED Nothing was compared with PyTorch." in nothing


def test_a_failed_report_is_an_error_that_tells_what_passed_where_precisions_are_known() -> None:
    failed = failed_report()
    (bad,) = {comparison.artifact for comparison in failed.comparisons if not comparison.passed}
    known = {bad: "fp16", "decoder.ort.fp32": "fp32"}
    with pytest.raises(VerificationError, match="fp32 passed: fp16 can be left out") as caught:
        dataclasses.replace(failed, precisions=known).raise_if_failed()
    assert caught.value.failed == {bad}
    for precisions in ({}, {"decoder.ort.fp32": "fp32"}):
        with pytest.raises(VerificationError) as caught:
            dataclasses.replace(failed, precisions=precisions).raise_if_failed("try something else")
        assert "can be left out" not in str(caught.value)
        assert str(caught.value).endswith("try something else")


def test_a_failed_page_tells_what_where_and_by_how_much() -> None:
    page = re.sub(r"\s+", " ", Page(render_html(failed_report(), SUBJECT)).text)
    for words in (
        "h.1.attn node h.1.attn of h.1.attn, layer 1",  # operator, ONNX node, PyTorch module
        "h.1.attn in float16",
        "range seen-70000 to inf range expected-2.5 to 3.25",
        "off by17.5 of the spread of what is expected (at most 0.02)",
        "NaN or infinity in the results",
        "over its limit: not finite",
        "so this is a fault",
        "␣the",
        "17 nodes",
        "reaches 1.1e+05",
        "65504",
        "limit of fp16: 0.1",
        "my-model",
        "2026-01-02 03:04 UTC",
    ):
        assert words in page, words


def test_a_page_needs_nothing_else_and_may_run_nothing() -> None:
    html = render_html(failed_report(), SUBJECT)
    assert "default-src 'none'" in html
    assert not re.search(r"<(script|link|img|iframe)\b|src=|@import|url\(|https?:", html)
    targets = re.findall(r'href="([^"]*)"', html)
    assert targets and all(target.startswith("#") for target in targets)
    assert all(f'id="{target[1:]}"' in html for target in targets)


@settings(max_examples=60, deadline=None)
@given(st.text(st.sampled_from("<>&\"'/{%}ab") | st.characters(exclude_characters=" \t\n"), min_size=1))
def test_any_text_stays_text_in_the_page(text: str) -> None:
    html = render_html(failed_report(text), Subject(text, {"from": text}))
    html.encode("utf-8")
    page = Page(html)
    assert page.tags == plain_tags()
    assert page.text.count(make_printable(text)) >= 15
    assert make_printable(page.text) == page.text


@functools.cache
def plain_tags() -> list[tuple[str, ...]]:
    return Page(render_html(failed_report("x"), Subject("x", {"from": "x"}))).tags


@pytest.mark.parametrize(
    "text",
    ["<script>alert(1)</script>", '"><svg onload=x>', "{{ 7 * 7 }}", "</style>", "\x1b[2J\u202e\ud800"],
)
def test_hostile_text_stays_text(text: str) -> None:
    page = Page(render_html(failed_report(text), Subject(text, {"from": text})))
    assert page.tags == plain_tags()
    assert make_printable(text) in page.text


# ---- a terminal


def printed(report: VerificationReport) -> str:
    console = Console(width=100, no_color=True, force_terminal=False)
    with console.capture() as capture:
        console.print(*make_tables(report))
    return capture.get()


def test_the_terminals_table_fits_100_columns(demo_bundle: Path) -> None:
    reports = (demo_report(demo_bundle), failed_report(), failed_report("a_long_name" * 20))
    for report in reports:
        text = printed(report)
        assert max(map(len, text.splitlines())) <= 100
        assert "…" not in text
    assert printed(reports[0]).startswith(f"passed: {len(reports[0].comparisons)} comparisons with PyTorch")
    lines = printed(reports[0]).splitlines()
    told = sum("full context" in line and line.rstrip().endswith("passed") for line in lines)
    assert told == sum(c.case == "full context" for c in reports[0].comparisons) >= 5
    assert any("decoder.portable.fp16: 9 LayerNormalization (sums squares)" in line for line in lines)


def test_the_terminal_shows_what_failed_in_full() -> None:
    text = " ".join(printed(failed_report()).split())
    for words in (
        "FAILED: 1 of 3 comparisons with PyTorch",
        "decoder.ort.fp16 on ort-cpu, greedy: NaN or infinity in the results; h.1.attn",
        "node 'h.1.attn' (h.1.attn, float16) of h.1.attn, layer 1 is the first to exceed its tolerance",
        "2 Add (reaches 1.1e+05)",
    ):
        assert words in text, words
    assert "\x1b" not in printed(failed_report("\x1b[2J"))


# ---- JUnit XML


def test_junit_has_a_suite_per_graph_and_a_test_per_comparison() -> None:
    root = ElementTree.fromstring(render_junit(failed_report(), "my-model"))
    assert (root.tag, root.get("name"), root.get("tests"), root.get("failures")) == (
        "testsuites",
        "my-model",
        "3",
        "1",
    )
    suites = [(s.get("name"), s.get("tests"), s.get("failures")) for s in root]
    assert suites == [("h.1.attn", "2", "0"), ("decoder.ort.fp16", "1", "1")]
    (failure,) = root.iter("failure")
    assert failure.get("message") == "NaN or infinity in the results; h.1.attn"
    assert "node 'h.1.attn' (h.1.attn, float16) of h.1.attn, layer 1" in str(failure.text)
    case = root[1][0]
    assert (case.get("classname"), case.get("name")) == ("decoder.ort.fp16", "ort-cpu: greedy")
    assert "mean_kl: 0.5 (at most 0.001)" in str(case.findtext("system-out"))


def test_junit_of_nothing_is_a_failure() -> None:
    root = ElementTree.fromstring(render_junit(VerificationReport(True, ()), "empty"))
    assert root.get("failures") == "1" and len(list(root.iter("failure"))) == 1


@given(st.text())
def test_junit_holds_any_text(text: str) -> None:
    xml = render_junit(failed_report(text), text)
    root = ElementTree.fromstring(xml.encode("utf-8"))
    assert root.get("name") == root[0].get("name") == make_printable(text)
    (failure,) = root.iter("failure")
    assert make_printable(text) in str(failure.get("message"))


# ---- files


@given(st.text())
def test_printable_text_has_no_control_characters_and_stays_what_it_is(text: str) -> None:
    shown = make_printable(text)
    assert make_printable(shown) == shown
    assert all(c.isprintable() or c.isspace() or ord(c) > 0x7F for c in shown)
    if text.isascii() and text.isprintable():
        assert shown == text


def test_a_file_is_replaced_whole_also_behind_a_link(tmp_path: Path) -> None:
    (tmp_path / "there.html").write_text("old")
    (tmp_path / "link.html").symlink_to(tmp_path / "there.html")
    check_writable(tmp_path / "link.html")
    write_whole(tmp_path / "link.html", "new")
    assert (tmp_path / "there.html").read_text() == "new"
    assert (tmp_path / "link.html").is_symlink()
    assert len(list(tmp_path.iterdir())) == 2


def test_what_cannot_be_written_is_refused_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (
        tmp_path,
        tmp_path / "none" / "x",
        tmp_path / "file" / "x",
        tmp_path / ("x" * 300),
        Path("/dev/null"),
    ):
        with pytest.raises(OutputError, match="cannot be written") as caught:
            check_writable(path)
        assert str(path) in str(caught.value)
    with pytest.raises(OutputError, match="No such file"):
        write_whole(tmp_path / "none" / "x", "text")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


# ---- the command


@pytest.mark.parametrize(
    ("arguments", "message", "code"),
    [
        (["--report", "none/x.html"], "none/x.html cannot be written: No such file or directory", 1),
        (["--junit", "."], ". cannot be written: it is not a file", 1),
        (["--report", "x", "--junit", "x"], "--report and --junit are both x; give each its own file", 2),
        (["--limit", "max_error"], "--limit 'max_error' must be METRIC=VALUE, as in max_error=0.001", 2),
        (["--limit", "max_error=nan"], "--limit 'max_error=nan' must be METRIC=VALUE", 2),
    ],
)
def test_what_would_fail_at_the_end_fails_before_anything_is_read(
    arguments: list[str], message: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert message in error_line("verify", "no-bundle", *arguments, code=code)
    assert not list(tmp_path.iterdir())


def test_verify_writes_the_page_and_the_xml_of_what_failed(
    demo_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify_module, "find_recorded_source", lambda bundle: None)
    page = tmp_path / "parity.html"
    junit = tmp_path / "parity.xml"
    options = ["--only", "decoder.ort.fp32", "--limit", "mean_error=0"]
    files = ["--report", str(page), "--junit", str(junit)]
    done = CliRunner().invoke(app, ["verify", str(demo_bundle), *options, *files])
    assert done.exit_code == 1, done.output
    assert "FAILED" in done.stdout and "at most 0 is wanted" in done.stdout
    text = Page(page.read_text(encoding="utf-8")).text
    for words in ("FAILED", "golden data, without PyTorch", "gpt2, text-generation", "decoder.ort.fp32"):
        assert words in text, words
    assert "mean_error is" in text and "decoder.portable.fp32" not in text
    suites = ElementTree.parse(junit).getroot()
    assert [suite.get("name") for suite in suites] == ["manifest and tokenizer", "decoder.ort.fp32"]
    assert int(suites.get("failures", "0")) > 0


# ---- a browser


def browse(page: Path, width: int, *options: str) -> str:
    """What the browser prints; the page is 2000 pixels high."""
    command = [find_browser(), "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    command += [f"--user-data-dir={page.parent / 'profile'}", f"--window-size={width},2000"]
    done = subprocess.run(
        [*command, *options, page.as_uri()], capture_output=True, encoding="utf-8", timeout=120, check=True
    )
    return done.stdout


def looked_at(page: Path, width: int, dark: bool = False) -> tuple[set[Any], Any]:
    """The colours of a screenshot, and that of the page."""
    picture = page.with_suffix(".png")
    options = ["--blink-settings=preferredColorScheme=0"] if dark else []
    browse(page, width, f"--screenshot={picture}", *options)
    image = Image.open(picture).convert("RGB")
    assert image.size == (width, 2000)
    colors = image.getcolors(image.width * image.height)
    assert colors is not None
    return {color for _, color in colors}, max(colors)[1]


# Right edges: of what reaches furthest, of the page's column, of all that can be scrolled to, of the window.
MEASURE = """<script>
const right = element => element.getBoundingClientRect().right
const seen = [...document.querySelectorAll("main *")]
const edges = seen.filter(e => !e.closest(".picture svg, .hidden, thead")).map(right)
const column = right(document.querySelector("main"))
document.title = [Math.max(...edges), column, document.documentElement.scrollWidth, innerWidth].join(" ")
</script>"""


@pytest.mark.parametrize("kind", ["demo", "failed", "long names"])
def test_a_browser_shows_the_page(kind: str, demo_bundle: Path, tmp_path: Path) -> None:
    if kind == "demo":
        report = demo_report(demo_bundle)
    else:
        report = failed_report("a_name_without_end" * 12 if kind == "long names" else "h.1.attn")
    page = tmp_path / "page.html"
    page.write_text(render_html(report, SUBJECT), encoding="utf-8")
    colors, background = looked_at(page, 1200)
    assert background == (255, 255, 255) and len(colors) > 100
    verdict = (23, 112, 63) if report.passed else (179, 38, 30)  # the disc beside it
    assert verdict in colors
    if kind == "demo":
        _, background = looked_at(page, 1200, dark=True)
        assert max(background) < 50
    dom = Page(browse(page, 1200, "--dump-dom")).text
    assert ("Passed" if report.passed else "FAILED") in dom
    assert all(mismatch.node in dom for mismatch in report.mismatches)
    measured = tmp_path / "measured.html"
    html = re.sub(r"<meta http-equiv=.*?>", "", page.read_text(encoding="utf-8"))
    measured.write_text(html.replace("</body>", f"{MEASURE}</body>"), encoding="utf-8")
    for width in (400, 800, 1070, 1200):
        title = re.search(r"<title>(.*?)</title>", browse(measured, width, "--dump-dom"))
        assert title is not None
        furthest, column, scrollable, window = map(float, title[1].split())
        assert window == width and scrollable <= width
        assert furthest <= column + 0.5
