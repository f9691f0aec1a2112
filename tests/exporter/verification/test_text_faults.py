"""Faults beside the graphs, with every hash put right: verify and selftest catch each, and name it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from planforge.exporter import VerificationReport, verify
from planforge.exporter.verification import verify as verify_module
from planforge.runtime.apps.check import selftest as selftest_module
from planforge.runtime.apps.check.golden_texts import find_texts
from planforge.runtime.apps.check.outcome import Comparison
from planforge.runtime.apps.check.selftest import SelftestResult, selftest
from planforge.runtime.apps.check.texts import FILES
from planforge.runtime.bundle.bundle import Bundle
from planforge.runtime.errors import BundleError

from ...helpers.fault_table import Row, collect_table
from ...helpers.plans import with_manifest
from ...helpers.selftest import mend

Edit = Callable[[Path], None]
FindBundle = Callable[[str], tuple[Path, str | Path]]
NATIVE = ("gpt2", "llama", "classifier", "marian", "dates")


@pytest.fixture
def find_bundle(request: pytest.FixtureRequest) -> FindBundle:
    """A sound bundle by its name, and its checkpoint. Don't change them."""

    def find(name: str) -> tuple[Path, str | Path]:
        demos = {"gpt2": "demo_bundle", "llama": "llama_demo_bundle", "dates": "dates_bundle"}
        argument = {"gpt2": "gpt2-demo", "llama": "llama-demo", "dates": "transformer-demo"}
        if name in demos:
            return request.getfixturevalue(demos[name]), argument[name]
        if name == "marian":
            bundle: Path = request.getfixturevalue("marian_bundle")
            return bundle, bundle.parent / "marian"
        if name.startswith("imported "):
            kind = name.removeprefix("imported ")
            return request.getfixturevalue("imported")(kind), request.getfixturevalue("exported") / kind
        bundle = request.getfixturevalue("head_bundle")(name)
        return bundle, bundle.parent / name

    return find


@pytest.fixture
def without_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves out what the graphs compute, which takes the time and has tests of its own."""
    passed = VerificationReport(True, (Comparison({}, {}, (), artifact="x", backend="x", case="x"),))
    monkeypatch.setattr(verify_module, "verify_with_pytorch", lambda *_: passed)
    monkeypatch.setattr(verify_module, "verify_with_golden_data", lambda *_: passed)
    monkeypatch.setattr(selftest_module, "prepare_subjects", lambda *_: [])


def told(result: VerificationReport | SelftestResult) -> str:
    """All failures, a line each."""
    comparisons = result.texts if isinstance(result, SelftestResult) else result.comparisons
    return "\n".join(f"{c.case}: {failure}" for c in comparisons for failure in c.failures)


def find_line(text: str, part: str) -> str:
    """Return the first line that has a part."""
    return next(line for line in text.splitlines() if part in line)


# What changes a bundle


def edit_tokenizer(change: Callable[[dict[str, Any]], None], number: int = 0) -> Edit:
    def edit(bundle: Path) -> None:
        name = Bundle.open(bundle).manifest.tokenizer["files"][number]
        value = json.loads((bundle / name).read_text(encoding="utf-8"))
        change(value)
        (bundle / name).write_text(json.dumps(value), encoding="utf-8")
        mend(bundle, name)

    return edit


def edit_template(before: str, after: str) -> Edit:
    def edit(bundle: Path) -> None:
        name = Bundle.open(bundle).manifest.tokenizer["chat_template"]["file"]
        text = (bundle / name).read_text(encoding="utf-8")
        assert before in text
        (bundle / name).write_text(text.replace(before, after), encoding="utf-8")
        mend(bundle, name)

    return edit


def set_default(part: str, name: str, value: Any) -> Edit:
    def change(manifest: dict[str, Any]) -> None:
        assert manifest[part][name] != value
        manifest[part][name] = value

    def edit(bundle: Path) -> None:
        with_manifest(bundle, change)

    return edit


def exchange_merges(first: int, second: int) -> Callable[[dict[str, Any]], None]:
    def change(value: dict[str, Any]) -> None:
        merges = value["model"]["merges"]
        merges[first], merges[second] = merges[second], merges[first]

    return change


def keep_case(value: dict[str, Any]) -> None:
    assert value["normalizer"]["lowercase"] is True
    value["normalizer"]["lowercase"] = False


def exchange_pieces(value: dict[str, Any]) -> None:
    pieces = value["model"]["vocab"]
    spelled = {piece: index for index, (piece, _) in enumerate(pieces)}
    one, other = spelled["▁the"], spelled["▁a"]
    pieces[one], pieces[other] = pieces[other], pieces[one]


def make_plain(value: dict[str, Any]) -> None:
    """A special token that is one no longer."""
    token = next(token for token in value["added_tokens"] if token["special"])
    token["special"] = False


def drop_template(bundle: Path) -> None:
    with_manifest(bundle, lambda manifest: manifest["tokenizer"].pop("chat_template"))


@dataclass(frozen=True)
class Fault:
    """A fault, and what each of both must say of it."""

    bundle: str
    name: str
    plant: Edit
    verify: str
    selftest: str
    missed_before: bool = False  # by the verification that compared graphs alone


@pytest.fixture(scope="module")
def table() -> Iterator[list[Row]]:
    with collect_table("text-faults", ("bundle", "fault", "verify", "selftest", "missed before")) as rows:
        yield rows


FAULTS = [
    Fault(
        bundle="gpt2",
        name="two merges exchanged",
        plant=edit_tokenizer(exchange_merges(0, 8)),
        verify='model.merges[0] is ["i", "n"], the checkpoint\'s is ["t", "h"]',
        selftest="texts to ids: token ",
        missed_before=True,
    ),
    Fault(
        bundle="gpt2",
        name="two merges whose order seldom matters",
        plant=edit_tokenizer(exchange_merges(0, 2)),
        verify='model.merges[0] is ["Ġth", "e"], the checkpoint\'s is ["t", "h"]',
        selftest="is another file than at export, though the manifest lists its hash",
    ),
    Fault(
        bundle="classifier",
        name="no lower-casing",
        plant=edit_tokenizer(keep_case),
        verify="normalizer.lowercase is false, the checkpoint's is true",
        selftest="of 'NASA LAUNCHED A ROCKET' ",
        missed_before=True,
    ),
    Fault(
        bundle="llama",
        name="an altered chat template",
        plant=edit_template("'<|im_end|>\\n'", "'<|im_end|>'"),
        verify="line 2 from character",
        selftest="the chat that ends with 'Who are you?' is from character",
        missed_before=True,
    ),
    Fault(
        bundle="llama",
        name="another word in the chat template",
        plant=edit_template("assistant", "helper"),
        verify="line 5 from character",
        selftest="im_start|>helper",
    ),
    Fault(
        bundle="llama",
        name="no chat template",
        plant=drop_template,
        verify="there is no chat template",
        selftest="there is no chat template",
    ),
    Fault(
        bundle="gpt2",
        name="another end token",
        plant=set_default("generation", "eos", [5]),
        verify="generation.eos is [5] ('%'), the checkpoint's is [0] ('<|endoftext|>')",
        selftest="generation.eos is [5], at export it was [0]",
        missed_before=True,
    ),
    Fault(
        bundle="classifier",
        name="pooling by CLS instead of mean",
        plant=set_default("encoder", "pooling", "cls"),
        verify='encoder.pooling is "cls", the checkpoint\'s is "mean"',
        selftest='encoder.pooling is "cls", at export it was "mean"',
        missed_before=True,
    ),
    Fault(
        bundle="marian",
        name="other beams",
        plant=set_default("generation", "num_beams", 3),
        verify="generation.num_beams is 3, the checkpoint's is 1",
        selftest="generation.num_beams is 3, at export it was 1",
        missed_before=True,
    ),
    Fault(
        bundle="dates",
        name="another length",
        plant=set_default("generation", "max_new_tokens", 9),
        verify="generation.max_new_tokens is 9, the checkpoint's is 15",
        selftest="generation.max_new_tokens is 9, at export it was 15",
    ),
    Fault(
        bundle="gpt2",
        name="a token before every prompt",
        plant=set_default("generation", "prefix", [7]),
        verify='generation.prefix is [7] ("\'")',
        selftest="texts as the model reads them: token 0 of ",
        missed_before=True,
    ),
    Fault(
        bundle="classifier",
        name="classes exchanged",
        plant=set_default("encoder", "labels", ["LABEL_1", "LABEL_0", "LABEL_2"]),
        verify='encoder.labels is ["LABEL_1", "LABEL_0", "LABEL_2"], the checkpoint\'s is ["LABEL_0"',
        selftest="encoder.labels is ",
    ),
    Fault(
        bundle="classifier",
        name="several labels",
        plant=set_default("encoder", "problem_type", "multi_label_classification"),
        verify="encoder.problem_type is",
        selftest="encoder.problem_type is",
    ),
    Fault(
        bundle="classifier",
        name="a prompt",
        plant=set_default("encoder", "prompts", {"query": "find: "}),
        verify="encoder.prompts.query is",
        selftest="encoder.prompts.query is",
    ),
    Fault(
        bundle="marian",
        name="two pieces exchanged",
        plant=edit_tokenizer(exchange_pieces),
        verify="model.vocab[",
        selftest="source's texts to ids: token ",
    ),
    Fault(
        bundle="dates",
        name="a target's special token that is plain",
        plant=edit_tokenizer(make_plain, 1),
        verify="special is false, the checkpoint's is true",
        selftest="target's ids to texts: the ids of ",
    ),
]


@pytest.mark.parametrize("fault", FAULTS, ids=[f"{fault.bundle}: {fault.name}" for fault in FAULTS])
@pytest.mark.usefixtures("without_graphs")
def test_a_fault_is_caught_and_named_by_both(
    fault: Fault, find_bundle: FindBundle, tmp_path: Path, table: list[Row]
) -> None:
    sound, source = find_bundle(fault.bundle)
    bundle = Path(shutil.copytree(sound, tmp_path / "bundle"))
    fault.plant(bundle)
    (only, *_) = (artifact.id for artifact in Bundle.open(bundle).manifest.artifacts)
    for report in (verify(bundle, source=source), verify(bundle, source=source, only=[only])):
        assert not report.passed and report.with_pytorch
        assert fault.verify in told(report)
    result = selftest(bundle, "ort-cpu")
    assert not result.passed
    assert fault.selftest in told(result)
    told_by_verify = find_line(told(report), fault.verify)
    told_by_selftest = find_line(told(result), fault.selftest)
    missed_before = "yes" if fault.missed_before else ""
    table.append((fault.bundle, fault.name, told_by_verify, told_by_selftest, missed_before))


@pytest.mark.parametrize("name", NATIVE)
@pytest.mark.usefixtures("without_graphs")
def test_what_was_exported_is_the_checkpoints(name: str, find_bundle: FindBundle) -> None:
    bundle, source = find_bundle(name)
    report = verify(bundle, source=source)
    assert report.passed, told(report)
    compared = {c.case: sum(c.metrics.values()) for c in report.comparisons if c.artifact == FILES}
    assert compared["tokenizer"] >= 3 and compared["settings"] > 20
    assert compared["texts as the model reads them"] > 30
    assert (compared.get("chats", 0) >= 5) == (name == "llama")
    result = selftest(bundle, "ort-cpu")
    assert result.passed and not result.skipped
    cases = [c.case for c in result.texts]
    assert all(case in compared for case in cases if case != "texts to texts")
    assert ("texts to texts" in cases) == (name in ("gpt2", "llama", "dates"))


IMPORTED_FAULTS = [
    ("llama", set_default("generation", "prefix", []), "generation.prefix is []", "generation.prefix is []"),
    ("electra", set_default("encoder", "labels", ["a", "b", "c"]), "encoder.labels is", "encoder.labels is"),
    ("mpnet", set_default("encoder", "pooling", "cls"), "encoder.pooling is", "encoder.pooling is"),
    (
        "t5",
        set_default("generation", "num_beams", 4),
        "generation.num_beams is 4",
        "generation.num_beams is 4",
    ),
    ("bart", edit_tokenizer(exchange_merges(0, 8)), "model.merges[0]", "texts to ids: token "),
]


@pytest.mark.parametrize(
    ("name", "plant", "by_verify", "by_selftest"), IMPORTED_FAULTS, ids=[name for name, *_ in IMPORTED_FAULTS]
)
@pytest.mark.usefixtures("without_graphs")
def test_imports_too(
    name: str,
    plant: Edit,
    by_verify: str,
    by_selftest: str,
    find_bundle: FindBundle,
    tmp_path: Path,
) -> None:
    """A sound one passes first."""
    sound, source = find_bundle(f"imported {name}")
    report = verify(sound, source=source)
    assert report.passed, told(report)
    assert selftest(sound, "ort-cpu").passed
    bundle = Path(shutil.copytree(sound, tmp_path / "bundle"))
    plant(bundle)
    assert by_verify in told(verify(bundle, source=source))
    assert by_selftest in told(selftest(bundle, "ort-cpu"))


@pytest.mark.usefixtures("without_graphs")
def test_without_the_checkpoint_golden_texts_tell(
    demo_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify_module, "find_recorded_source", lambda bundle: None)
    assert verify(demo_bundle).passed
    bundle = Path(shutil.copytree(demo_bundle, tmp_path / "bundle"))
    set_default("generation", "eos", [5])(bundle)
    assert "generation.eos is [5], at export it was [0]" in told(verify(bundle))


@pytest.mark.usefixtures("without_graphs")
def test_a_bundle_without_golden_texts_says_so(own_bundle: Path) -> None:
    """As one that an earlier version exported."""
    file = find_texts(Bundle.open(own_bundle))
    assert file is not None
    name = file.relative_to(own_bundle).as_posix()
    with_manifest(own_bundle, lambda manifest: manifest["files"].pop(name))
    result = selftest(own_bundle, "ort-cpu")
    assert result.passed
    assert [each.reason for each in result.skipped] == ["the bundle has no golden texts; export it again"]
    assert verify(own_bundle).passed


@pytest.mark.usefixtures("without_graphs")
def test_owners_of_bundles_that_earlier_versions_read_otherwise_are_told(
    head_bundle: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify_module, "find_recorded_source", lambda bundle: None)
    assert verify(head_bundle("ranker")).notes == ()
    bundle = Path(shutil.copytree(head_bundle("ranker"), tmp_path / "bundle"))
    edit_tokenizer(lambda value: value.update(post_processor=None))(bundle)
    file = find_texts(Bundle.open(bundle))
    assert file is not None
    old = json.loads(file.read_text(encoding="utf-8")) | {"reference": "tokenizers 0.22.1"}
    file.write_text(json.dumps(old), encoding="utf-8")
    mend(bundle, file.relative_to(bundle).as_posix())
    settings, frames = verify(bundle).notes
    assert "settings of tokenizer_config.json are not compared" in settings
    assert "export the checkpoint again where transformers is installed" in settings
    assert "puts none there and the bundle does" in frames and "export the checkpoint again" in frames


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"format": 2}', "[" * 10_000])
def test_golden_texts_that_cannot_be_read_are_one_line(content: str, own_bundle: Path) -> None:
    file = find_texts(Bundle.open(own_bundle))
    assert file is not None
    file.write_text(content, encoding="utf-8")
    mend(own_bundle, file.relative_to(own_bundle).as_posix())
    with pytest.raises(BundleError, match="golden texts cannot be read by this version") as caught:
        selftest(own_bundle, "ort-cpu")
    assert "\n" not in str(caught.value)
