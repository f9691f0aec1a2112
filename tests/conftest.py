"""What every test runs under: no network, no skipping in CI, a line about what slow tests cost."""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Callable, Generator
from pathlib import Path

import pytest

# Set before any test module imports the libraries that read them.
os.environ["HF_HUB_OFFLINE"] = "1"  # a test that would download fails at once
os.environ["TOKENIZERS_PARALLELISM"] = "false"  # else tokenizers warns after a fork

# CI has everything but these, so there a test that is skipped for any other reason is a failure.
ALLOWED_REASONS = ("needs a GPU",)

Report = pytest.TestReport | pytest.CollectReport
seconds = {"slow": 0.0, "other": 0.0}


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if not hasattr(report, "wasxfail"):  # pytest reports an expected failure as skipped
        fail_skipped(report)
    seconds["slow" if item.get_closest_marker("slow") else "other"] += report.duration
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    fail_skipped(report)  # a whole module: pytest.importorskip, allow_module_level
    return report


def fail_skipped(report: Report) -> None:
    """Turn a skip into a failure when CI=true, unless its reason is allowed."""
    if os.environ.get("CI") != "true" or not report.skipped:
        return
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    reason = reason.removeprefix("Skipped: ")
    if not reason.startswith(ALLOWED_REASONS):
        report.outcome = "failed"
        report.longrepr = f"{report.nodeid}: skipped, which CI=true forbids: {reason}"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.write_line(
        f"full-size shapes: {seconds['slow']:.0f} s, other tests: {seconds['other']:.0f} s"
    )


DIALECTS = ("cpu", "portable", "rtx")  # a target of each


@pytest.fixture(scope="session")
def demo_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """gpt2-demo in every dialect, fp32, and fp16 where there is one, plan, verified. Don't change it."""
    from planforge.exporter import export

    folder = tmp_path_factory.mktemp("bundles") / "gpt2-demo"
    return export("gpt2-demo", folder, target=DIALECTS).bundle


@pytest.fixture(scope="session")
def whole_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """gpt2-demo in int8 and int4, not verified. Don't change it."""
    from planforge.exporter import export

    folder = tmp_path_factory.mktemp("bundles") / "gpt2-whole"
    return export("gpt2-demo", folder, precision=["int8", "int4"], target=["cpu"], verify=False).bundle


@pytest.fixture(scope="session")
def minilm_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """bert-demo, which is all-MiniLM-L6-v2, with the hidden states of all layers. Don't change it."""
    from planforge.exporter import export

    folder = tmp_path_factory.mktemp("bundles") / "minilm"
    return export(
        "bert-demo", folder, precision=["fp32"], target=["cpu"], outputs=["hidden_states"], verify=False
    ).bundle


# Names of tiny bundles, each with its architecture and number of classes.
HEADS = {
    "classifier": ("BertForSequenceClassification", 3),
    "ranker": ("BertForSequenceClassification", 1),
    "tagger": ("BertForTokenClassification", 3),
    "reader": ("BertForQuestionAnswering", 2),
    "pretrained": ("BertForPreTraining", 2),
    "distilled": ("DistilBertForSequenceClassification", 2),
}


@pytest.fixture(scope="session")
def head_bundle(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The bundle of one of `HEADS` by its name: random, fp32 and fp16, verified. Don't change it."""
    from planforge.exporter import export

    from .helpers_models import tiny_bert, write_wordpiece

    folder = tmp_path_factory.mktemp("heads")

    @functools.cache
    def bundle(name: str) -> Path:
        architecture, labels = HEADS[name]
        tiny_bert(folder / name, architecture, num_labels=labels)
        write_wordpiece(folder / name)
        return export(folder / name, folder / f"{name}-bundle", target=["cpu", "portable"]).bundle

    return bundle


@pytest.fixture(scope="session")
def marian_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random MarianMT with real tokenizers in every dialect, fp32, and fp16 where there is one, plans.

    Its checkpoint lies beside it, as "marian". Don't change them.
    """
    from planforge.exporter import export

    from .helpers_translation import write_varied_marian

    folder = tmp_path_factory.mktemp("translators")
    checkpoint = write_varied_marian(folder / "marian")
    return export(checkpoint, folder / "bundle", target=DIALECTS).bundle


@pytest.fixture(scope="session")
def dates_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """transformer-demo with its attention, for ONNX Runtime: fp32 and fp16. Don't change it."""
    from planforge.exporter import export

    folder = tmp_path_factory.mktemp("bundles") / "transformer-demo"
    target = ["cpu", "portable"]
    return export("transformer-demo", folder, target=target, outputs=["cross_attentions"]).bundle


@pytest.fixture
def own_bundle(demo_bundle: Path, tmp_path: Path) -> Path:
    """A copy of `demo_bundle` to damage."""
    return Path(shutil.copytree(demo_bundle, tmp_path / "bundle"))
