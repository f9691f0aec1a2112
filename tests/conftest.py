"""What every test runs under: no network, no skipping in CI, a line about what slow tests cost."""

from __future__ import annotations

import functools
import gc
import os
import shutil
import sys
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from filelock import FileLock

from .helpers.optimums import write_optimums_exports
from .helpers.order import find_place, rotate

Once: TypeAlias = AbstractContextManager[tuple[Path, bool]]

# Set before any test module imports the libraries that read them.
os.environ["HF_HUB_OFFLINE"] = "1"  # a test that would download fails at once
os.environ["TOKENIZERS_PARALLELISM"] = "false"  # else tokenizers warns after a fork
# PyTorch answers each test anew, and nothing of the user's is read; tests of kept answers turn them on.
os.environ["PLANFORGE_ANSWERS_MB"] = "0"
# One thread each: two workers on two cores would only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# CI has everything but these, so there a test that is skipped for any other reason is a failure.
ALLOWED_REASONS = ("needs a GPU",)

Report = pytest.TestReport | pytest.CollectReport
seconds = {"slow": 0.0, "other": 0.0}
frozen = {"modules": 0}  # how many were loaded when garbage was collected last


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=find_place)


def pytest_collection_finish() -> None:
    # Tracing makes millions of objects; looking for cycles took a fifth of its time.
    gc.set_threshold(100_000)


def pytest_runtest_setup() -> None:
    """Hide what imports left from the garbage collector, which each verification runs three times."""
    modules = len(sys.modules)
    if modules > frozen["modules"] + 300:
        gc.collect()
        gc.freeze()
        frozen["modules"] = modules


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if not hasattr(report, "wasxfail"):  # pytest reports an expected failure as skipped
        fail_skipped(report)
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    seconds["slow" if "slow" in report.keywords else "other"] += report.duration


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    fail_skipped(report)  # a whole module: pytest.importorskip, allow_module_level
    if isinstance(collector, pytest.Directory) and report.passed:
        report.result = rotate(report.result)
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
NODES = 200  # whose sessions are kept: each has a thread


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Callable[[str], Once]:
    """`with once("x") as folder`: a folder of all workers, and whether this one has to fill it."""
    base = tmp_path_factory.getbasetemp()
    base = base if worker_id == "master" else base.parent

    @contextmanager
    def shared(name: str) -> Generator[tuple[Path, bool], None, None]:
        with FileLock(base / f"{name}.lock"):
            yield base / name, not (base / f"{name}.done").exists()
            (base / f"{name}.done").touch()

    return shared


@pytest.fixture(scope="session", autouse=True)
def trace_once() -> Generator[None, None, None]:
    """Trace in the tests' own process; every test of the command traces in child processes as users do."""
    from .helpers.traces import trace_each_graph_once

    with trace_each_graph_once():
        yield


@pytest.fixture(scope="session", autouse=True)
def keep_node_sessions() -> Generator[None, None, None]:
    """Open ONNX Runtime's session of a node once, for all graphs that are run node by node and have it."""
    from planforge.exporter.execution import node_executor
    from planforge.runtime.backends.ort_program import open_plain_session

    with pytest.MonkeyPatch.context() as patch:
        kept = functools.lru_cache(maxsize=NODES)(open_plain_session)
        patch.setattr(node_executor, "open_plain_session", kept)
        yield


@pytest.fixture(scope="module")
def kept_answers(tmp_path_factory: pytest.TempPathFactory) -> Generator[None, None, None]:
    """Keep what PyTorch answers, as users do, for all tests of a module that ask the same."""
    from .helpers.verdicts import keep_answers

    with keep_answers(tmp_path_factory.mktemp("answers")):
        yield


@pytest.fixture(scope="session", autouse=True)
def keep_memory() -> Generator[None, None, None]:
    """Let verification of tiny models give memory back between a few of its stages alone."""
    from .helpers.memory import give_memory_back_seldom

    with give_memory_back_seldom():
        yield


@pytest.fixture(scope="session")
def demo_bundle(once: Callable[[str], Once]) -> Path:
    """gpt2-demo in every dialect, fp32, and fp16 where there is one, plan, verified. Don't change it."""
    from planforge.exporter import export

    with once("gpt2-demo") as (folder, first):
        if first:
            export("gpt2-demo", folder, target=DIALECTS)
    return folder


@pytest.fixture(scope="session")
def whole_bundle(once: Callable[[str], Once]) -> Path:
    """gpt2-demo in int8 and int4, not verified. Don't change it."""
    from planforge.exporter import export

    with once("gpt2-whole") as (folder, first):
        if first:
            export("gpt2-demo", folder, precision=["int8", "int4"], target=["cpu"], verify=False)
    return folder


@pytest.fixture(scope="session")
def llama_demo_bundle(once: Callable[[str], Once]) -> Path:
    """llama-demo for ONNX Runtime, in fp32, int8 and int4, verified. Don't change it."""
    from planforge.exporter import export

    with once("llama-demo") as (folder, first):
        if first:
            export("llama-demo", folder, precision=["fp32", "int8", "int4"], target=["cpu"])
    return folder


@pytest.fixture(scope="session")
def minilm_bundle(once: Callable[[str], Once]) -> Path:
    """bert-demo, which is all-MiniLM-L6-v2, with the hidden states of all layers. Don't change it."""
    from planforge.exporter import export

    with once("minilm") as (folder, first):
        if first:
            outputs = ["hidden_states"]
            export("bert-demo", folder, precision=["fp32"], target=["cpu"], outputs=outputs, verify=False)
    return folder


# Names of tiny bundles, each with its architecture and number of classes. Tracing takes most of an export, so
# all but the one in which faults are planted have a single layer.
HEADS = {
    "classifier": ("BertForSequenceClassification", 3),
    "ranker": ("BertForSequenceClassification", 1),
    "chooser": ("BertForMultipleChoice", 1),
    "tagger": ("BertForTokenClassification", 3),
    "reader": ("BertForQuestionAnswering", 2),
    "pretrained": ("BertForPreTraining", 2),
    "distilled": ("DistilBertForSequenceClassification", 2),
}


@pytest.fixture(scope="session")
def head_bundle(once: Callable[[str], Once]) -> Callable[[str], Path]:
    """The bundle of one of `HEADS` by its name: random, fp32 and fp16, verified. Don't change it."""
    from planforge.exporter import export

    from .helpers.models import tiny_bert, write_wordpiece

    @functools.cache
    def bundle(name: str) -> Path:
        architecture, labels = HEADS[name]
        with once(f"heads-{name}") as (folder, first):
            if first:
                depth = "n_layers" if architecture.startswith("DistilBert") else "num_hidden_layers"
                layers = 2 if name == "classifier" else 1
                tiny_bert(folder / name, architecture, num_labels=labels, **{depth: layers})
                write_wordpiece(folder / name)
                export(folder / name, folder / f"{name}-bundle", target=["cpu", "portable"])
        return folder / f"{name}-bundle"

    return bundle


@pytest.fixture(scope="session")
def marian_bundle(once: Callable[[str], Once]) -> Path:
    """A random MarianMT with real tokenizers in every dialect, fp32, and fp16 where there is one, plans.

    Its checkpoint lies beside it, as "marian". Don't change them.
    """
    from planforge.exporter import export

    from .helpers.translation import write_varied_marian

    with once("translators") as (folder, first):
        if first:
            checkpoint = write_varied_marian(folder / "marian")
            export(checkpoint, folder / "bundle", target=DIALECTS)
    return folder / "bundle"


@pytest.fixture(scope="session")
def dates_bundle(once: Callable[[str], Once]) -> Path:
    """transformer-demo with its attention, for ONNX Runtime: fp32 and fp16. Don't change it."""
    from planforge.exporter import export

    with once("transformer-demo") as (folder, first):
        if first:
            target = ["cpu", "portable"]
            export("transformer-demo", folder, target=target, outputs=["cross_attentions"])
    return folder


@pytest.fixture(scope="session")
def recurrent_bundle(once: Callable[[str], Once]) -> Path:
    """A random GRU of two directions with additive attention, its plans too. Don't change it."""
    from planforge.exporter import export

    from .helpers.recurrent import write_recurrent

    with once("recurrent") as (folder, first):
        if first:
            checkpoint = write_recurrent(folder / "checkpoint")
            outputs = ["cross_attentions"]
            export(checkpoint, folder / "bundle", target=["cpu", "rtx"], outputs=outputs, max_batch=4)
    return folder / "bundle"


@pytest.fixture(scope="session")
def retrieval_bundle(once: Callable[[str], Once]) -> Callable[[str], Path]:
    """The bundle of a kind of `WRITERS` in fp32, beside its folder "checkpoint". Don't change them."""
    from planforge.exporter import export

    from .helpers.retrieval_folders import write_folder

    @functools.cache
    def bundle(kind: str) -> Path:
        with once(f"retrieval-{kind}") as (folder, first):
            if first:
                checkpoint = write_folder(kind, folder / "checkpoint")
                export(checkpoint, folder / "bundle", target=["cpu"], precision=["fp32"])
        return folder / "bundle"

    return bundle


@pytest.fixture(scope="session")
def splade_bundle(retrieval_bundle: Callable[[str], Path]) -> Path:
    """A random SPLADE in fp32. Don't change it."""
    return retrieval_bundle("splade")


@pytest.fixture(scope="session")
def retro_bundle(once: Callable[[str], Once]) -> Path:
    """A random RETRO in fp32, int8 and fp16, its plans too. Don't change it."""
    from planforge.exporter import export

    from .helpers.retro import write_retro

    with once("retro") as (folder, first):
        if first:
            checkpoint = write_retro(folder / "checkpoint")
            options: dict[str, Any] = {"precision": ["fp32", "int8", "fp16"], "target": ["cpu", "rtx"]}
            report = export(checkpoint, folder / "bundle", sms=["sm86"], max_batch=4, **options).report
            assert report is not None and report.with_pytorch and report.passed
    return folder / "bundle"


@pytest.fixture(scope="session")
def recurrent_kind(once: Callable[[str], Once]) -> Callable[[str], Path]:
    """The bundle of one of `helpers.recurrent.KINDS`: fp32 for a CPU, verified. Don't change it."""
    from planforge.exporter import export

    from .helpers.recurrent import write_recurrent

    @functools.cache
    def bundle(kind: str) -> Path:
        with once(f"recurrent-{kind}") as (folder, first):
            if first:
                checkpoint = write_recurrent(folder / "checkpoint", kind)
                options: dict[str, Any] = {"precision": ["fp32"], "target": ["cpu"], "verify": "quick"}
                report = export(checkpoint, folder / "bundle", **options).report
                assert report is not None and report.with_pytorch and report.passed
        return folder / "bundle"

    return bundle


@pytest.fixture(scope="session")
def llama_bundle(once: Callable[[str], Once]) -> Callable[[str], Path]:
    """A folder by a name of `LLAMAS`: "checkpoint", and its "bundle" in `list_dialects`, fp32, unverified.

    Don't change them.
    """
    from .helpers.llamas import list_dialects, shallow_llama, write_dialects

    @functools.cache
    def make(name: str) -> Path:
        with once(f"llama-{name}") as (folder, first):
            if first:
                shallow_llama(folder / "checkpoint", name)
                write_dialects(folder / "checkpoint", folder / "bundle", list_dialects(name))
        return folder

    return make


EXPLAINED: dict[str, Any] = {
    "precision": ["fp32"],
    "target": ["cpu"],
    "outputs": ["explain"],
    "verify": "quick",
}


@pytest.fixture(scope="session")
def explained(once: Callable[[str], Once]) -> Callable[[str], Path]:
    """A folder by a name: a "bundle" with graphs that explain, and unless it is a demo its "checkpoint".

    Of gpt2-demo and transformer-demo; random ones of gemma 2 (windows, caps, shared heads), a classifier, a
    ranker, a ModernBERT, and a BERT that gives vectors of any length. Don't change them.
    """
    from planforge.exporter import export

    from .helpers.encoders import save_tiny_encoder
    from .helpers.llamas import shallow_llama
    from .helpers.models import tiny_bert, write_mean_pooling, write_wordpiece

    def write_checkpoint(checkpoint: Path, name: str) -> Path:
        if name == "gemma 2":
            shallow_llama(checkpoint, name)
        elif name == "modernbert":
            save_tiny_encoder(checkpoint, "ModernBert")
        else:
            kind = "BertModel" if name == "vectors" else "BertForSequenceClassification"
            layers = 2 if name == "classifier" else 1
            tiny_bert(checkpoint, kind, num_labels=1 if name == "ranker" else 3, num_hidden_layers=layers)
            write_wordpiece(checkpoint)
            if name == "vectors":
                write_mean_pooling(checkpoint)
        return checkpoint

    @functools.cache
    def make(name: str) -> Path:
        with once(f"explained-{name}") as (folder, first):
            if first:
                is_demo = name.endswith("-demo")
                source = name if is_demo else write_checkpoint(folder / "checkpoint", name)
                export(source, folder / "bundle", **EXPLAINED)
        return folder

    return make


@pytest.fixture
def own_bundle(demo_bundle: Path, tmp_path: Path) -> Path:
    """A copy of `demo_bundle` to damage."""
    return Path(shutil.copytree(demo_bundle, tmp_path / "bundle"))


@pytest.fixture(scope="session")
def exported(once: Callable[[str], Once]) -> Path:
    """Random checkpoints by their names, and beside them what optimum made of each. Don't change it."""
    with once("imported") as (folder, first):
        if first:
            write_optimums_exports(folder)
    return folder


@pytest.fixture(scope="module")
def warm_optimum() -> Generator[None, None, None]:
    """Load optimum once for all tests of a module that run it; others start it as users do."""
    from .helpers.warm_python import keep_optimum_warm

    with keep_optimum_warm():
        yield


@pytest.fixture(scope="session")
def imported(exported: Path, once: Callable[[str], Once]) -> Callable[[str], Path]:
    """Verified bundles of `exported`, in fp32, with their source recorded. Don't change them."""
    from planforge.exporter.exporting import import_folder

    def bundle(name: str) -> Path:
        with once(f"imported-{name}") as (folder, first):
            if first:
                options: dict[str, Any] = {"precision": ["fp32"], "target": ["cpu", "portable"]}
                options |= {"source": exported / name, "verify": "quick"}
                import_folder(exported / f"{name}.onnx", folder, **options)
        return folder

    return bundle


@pytest.fixture(scope="session")
def words_bundle(once: Callable[[str], Once]) -> Path:
    """Random word vectors for ONNX Runtime, in fp32 and int8, and in fp16, verified. Don't change it.

    The file of vectors lies beside it, as "vectors.txt".
    """
    from planforge.exporter import export

    from .helpers.words import write_glove

    with once("words") as (folder, first):
        if first:
            folder.mkdir(exist_ok=True)
            write_glove(folder / "vectors.txt")
            options: dict[str, Any] = {"precision": ["fp32", "fp16", "int8"]}
            export(folder / "vectors.txt", folder / "bundle", target=["cpu", "portable"], **options)
    return folder / "bundle"


@pytest.fixture(scope="session")
def clip_bundle(once: Callable[[str], Once]) -> Path:
    """A random CLIP for ONNX Runtime, in fp32 and int8, and in fp16, verified. Don't change it.

    Its checkpoint lies beside it, as "checkpoint".
    """
    from planforge.exporter import export

    from .helpers.diffusion import save_clip

    with once("clip") as (folder, first):
        if first:
            save_clip(folder / "checkpoint")
            options: dict[str, Any] = {"precision": ["fp32", "fp16", "int8"]}
            export(folder / "checkpoint", folder / "bundle", target=["cpu", "portable"], **options)
    return folder / "bundle"


@pytest.fixture(scope="session")
def picture_bundle(once: Callable[[str], Once]) -> Path:
    """A random Stable Diffusion for ONNX Runtime, in fp32 and int8, and in fp16, verified. Don't change it.

    Its checkpoint lies beside it, as "checkpoint".
    """
    from planforge.exporter import export

    from .helpers.diffusion import save_small_pipeline

    with once("pictures") as (folder, first):
        if first:
            save_small_pipeline(folder / "checkpoint")
            options: dict[str, Any] = {"precision": ["fp32", "fp16", "int8"]}
            export(folder / "checkpoint", folder / "bundle", target=["cpu", "portable"], **options)
    return folder / "bundle"
