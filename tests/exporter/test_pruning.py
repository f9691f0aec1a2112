"""`prune` leaves what targets and precisions need, in a bundle that answers and verifies as before."""

from __future__ import annotations

import json
import re
import shutil
import signal
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from planforge.exporter import export, prune, verify
from planforge.exporter.errors import OutputError
from planforge.exporter.precisions import PRECISIONS
from planforge.exporter.pruning import Keep, choose_graphs, choose_plans, is_for, parse_keep
from planforge.runtime import TextEncoder, Translator, load
from planforge.runtime.apps.check.files import PREFIX as GOLDEN
from planforge.runtime.apps.check.files import find_golden, read_golden
from planforge.runtime.apps.check.selftest import selftest
from planforge.runtime.bundle.bundle import Bundle
from planforge.runtime.errors import InputError, IntegrityError

from ..helpers.cli import error_line, planforge
from ..helpers.killed import STEPS, stop_at_every_step
from ..helpers.plans import of_tensorrt, with_manifest

TEXT = {"text-generation": "In the beginning", "text-encoding": "good bread", "translation": "good morning"}
# Fixtures, names to keep, and the graphs that stay.
KEPT = [
    ("demo_bundle", "cpu", ["decoder.ort.fp32"]),
    ("demo_bundle", "fp16,cpu", ["decoder.portable.fp16"]),
    ("demo_bundle", "fp32,fp16,cpu", ["decoder.ort.fp32", "decoder.portable.fp16"]),
    ("demo_bundle", "rtx", ["decoder.inplace.fp16"]),
    ("demo_bundle", "cuda", ["decoder.portable.fp32", "decoder.portable.fp16"]),
    ("demo_bundle", "fp16", ["decoder.portable.fp16", "decoder.inplace.fp16"]),
    ("demo_bundle", "fp32,portable", ["decoder.portable.fp32"]),
    ("demo_bundle", "fp32,fp16,cpu,rtx", ["decoder.ort.fp32", "decoder.inplace.fp16"]),
    ("llama_demo_bundle", "int8,cpu", ["decoder.ort.int8"]),
    ("llama_demo_bundle", "int4,fp32", ["decoder.ort.fp32", "decoder.ort.int4"]),
    ("marian_bundle", "cpu", ["encoder.ort.fp32", "decoder.ort.fp32"]),
    ("classifier", "fp16", ["encoder.portable.fp16"]),
]


@pytest.fixture(scope="module")
def find_bundle(request: pytest.FixtureRequest, head_bundle: Callable[[str], Path]) -> Callable[[str], Path]:
    """The bundle of a fixture, or of a tiny encoder, by its name."""

    def find(name: str) -> Path:
        return Path(request.getfixturevalue(name) if name.endswith("_bundle") else head_bundle(name))

    return find


def answer(bundle: Path, precision: str | None = None) -> Any:
    """What a bundle answers on the CPU, in its default precision where none is named."""
    with load(bundle, backend="ort-cpu", precision=precision) as model:
        text = TEXT[model.bundle.manifest.task]
        if isinstance(model, Translator):
            return model.translate(text, max_new_tokens=4).token_ids
        if isinstance(model, TextEncoder):
            return model.classify(text)
        return model.generate(text, max_new_tokens=4).token_ids


def list_files(bundle: Path) -> set[str]:
    return {path.relative_to(bundle).as_posix() for path in bundle.rglob("*") if path.is_file()}


def test_weights_quantized_for_plans_are_for_plans_alone(find_bundle: Callable[[str], Path]) -> None:
    opened = Bundle.open(find_bundle("classifier"))
    portable = next(a for a in opened.manifest.artifacts if a.dialect == "portable")
    in_half = {name for name, kind in PRECISIONS.items() if kind.quantizes_in_half and not kind.cache_bits}
    more = [replace(portable, precision=precision) for precision in sorted(in_half)]
    manifest = replace(opened.manifest, artifacts=(*opened.manifest.artifacts, *more))
    bundle = Bundle(opened.folder, manifest)
    for target in ("cpu", "cuda"):
        kept = choose_graphs(bundle, Keep((target,), ()))
        assert kept and not {artifact.precision for artifact in kept} & in_half
    for_plans = choose_graphs(bundle, Keep(("rtx",), ()))
    assert {artifact.precision for artifact in for_plans} >= in_half


@pytest.mark.parametrize(("name", "keep", "ids"), KEPT, ids=[f"{row[0]} {row[1]}" for row in KEPT])
def test_what_is_kept_verifies_and_answers_as_before(
    find_bundle: Callable[[str], Path], tmp_path: Path, name: str, keep: str, ids: list[str]
) -> None:
    original = find_bundle(name)
    bundle = shutil.copytree(original, tmp_path / "bundle")
    before = Bundle.open(original).manifest
    result = prune(bundle, keep=keep.split(","))
    after = Bundle.open(bundle)
    manifest = after.manifest
    assert sorted(a.id for a in manifest.artifacts) == sorted(ids) == sorted(result.kept)
    assert [a for a in before.artifacts if a.id in ids] == list(manifest.artifacts)
    after.verify_files()
    assert list_files(bundle) == {"manifest.json", *manifest.files}

    on_disk = sum((bundle / name).stat().st_size for name in manifest.files)
    assert (result.bytes_after, result.bytes_before) == (on_disk, sum(f.bytes for f in before.files.values()))
    assert set(result.removed) == set(before.files) - set(manifest.files)
    precisions = {artifact.precision for artifact in manifest.artifacts}
    golden = find_golden(after)
    whole = find_golden(Bundle.open(original))
    assert golden is not None and whole is not None
    limits = read_golden(golden)[1]
    assert limits == {p: own for p, own in read_golden(whole)[1].items() if p in precisions}
    (parity,) = bundle.glob("checks/parity-*.json")
    compared = {one["artifact"] for one in json.loads(parity.read_text(encoding="utf-8"))["comparisons"]}
    assert compared == set(ids)

    assert answer(bundle) == answer(original, manifest.artifacts[0].precision)
    assert verify(bundle, level="quick").passed
    assert selftest(bundle, backend="ort-cpu").passed
    assert planforge("inspect", bundle).returncode == 0


def test_a_bundle_without_its_checkpoint_is_verified_by_what_is_left(
    head_bundle: Callable[[str], Path], tmp_path: Path
) -> None:
    bundle = shutil.copytree(head_bundle("classifier"), tmp_path / "far" / "away" / "bundle")
    prune(bundle, keep=["fp16"])
    report = verify(bundle)
    assert report.passed and not report.with_pytorch


def test_a_default_that_is_removed_gives_way_to_the_first(demo_bundle: Path, tmp_path: Path) -> None:
    for keep, expected in (("fp32", None), ("fp16", "fp16")):
        bundle = shutil.copytree(demo_bundle, tmp_path / keep)
        with_manifest(bundle, lambda value: value.update(default_precision="fp16"))
        prune(bundle, keep=[keep])
        assert Bundle.open(bundle).manifest.default_precision == expected
        assert answer(bundle) == answer(demo_bundle, keep)


def test_plans_go_with_their_target_and_version(own_bundle: Path) -> None:
    (plan,) = Bundle.open(with_manifest(own_bundle, of_tensorrt)).manifest.plans
    assert is_for(plan, []) and is_for(plan, ["cpu", "tensorrt10.15"])
    assert not is_for(plan, ["rtx"]) and not is_for(plan, ["tensorrt10.16", "jetpack6.2", "cpu"])
    with_manifest(own_bundle, lambda value: value["plans"][0].update(compatible=True))
    (plan,) = Bundle.open(own_bundle).manifest.plans
    assert is_for(plan, ["tensorrt10.16"]) and not is_for(plan, ["jetpack6.2"])
    prune(own_bundle, keep=["tensorrt10.16"])
    assert Bundle.open(own_bundle).manifest.plans == (plan,)
    prune(own_bundle, keep=["rtx"])
    assert Bundle.open(own_bundle).manifest.plans == ()
    assert not (own_bundle / plan.file).exists()


def test_plans_go_with_their_gpu(own_bundle: Path) -> None:
    (plan,) = Bundle.open(own_bundle).manifest.plans
    copies = {name: f"plans/{name}.plan" for name in ("ampere", "ada", "later")}
    for file in copies.values():
        shutil.copy(own_bundle / plan.file, own_bundle / file)

    def add_plans(value: dict[str, Any]) -> None:
        (whole,) = value["plans"]
        for name, sms in (("ampere", ["sm80", "sm86"]), ("ada", ["sm89"]), ("later", ["sm86+"])):
            value["plans"].append({**whole, "file": copies[name], "sms": sms})
            value["files"][copies[name]] = value["files"][plan.file]

    with_manifest(own_bundle, add_plans)
    # As the engine takes them: "sm86+" is for sm89 and sm120 too.
    for sms, kept in (
        (["sm120"], [plan.file, copies["later"]]),
        (["sm89"], [plan.file, copies["ada"], copies["later"]]),
        (["sm80", "sm89"], [plan.file, *copies.values()]),
    ):
        opened = Bundle.open(own_bundle)
        keep = Keep(("rtx",), (), tuple(sms))
        assert [p.file for p in choose_plans(opened, keep, choose_graphs(opened, keep))] == kept
    result = prune(own_bundle, keep=["rtx", "RTX 50"])
    manifest = Bundle.open(own_bundle).manifest
    assert [p.file for p in manifest.plans] == [plan.file, copies["later"]]
    assert {copies["ampere"], copies["ada"]} < set(result.removed)
    assert not (own_bundle / copies["ada"]).exists()


def test_graphs_without_kernels_on_the_named_gpus_go(own_bundle: Path) -> None:
    """A copy of the graph in fp16 stands for one in fp4, with a plan of its own."""
    copied = "decoder.inplace.nvfp4a16"

    def add_graph(value: dict[str, Any]) -> None:
        (half,) = (one for one in value["artifacts"] if one["id"] == "decoder.inplace.fp16")
        (plan,) = value["plans"]
        files = {
            half["file"]: "onnx/fp4.onnx",
            half["data"][0]: "onnx/fp4.data",
            plan["file"]: "plans/fp4.plan",
        }
        for old, new in files.items():
            shutil.copy(own_bundle / old, own_bundle / new)
            value["files"][new] = value["files"][old]
        own = {"id": copied, "precision": "nvfp4a16", "file": "onnx/fp4.onnx", "data": ["onnx/fp4.data"]}
        value["artifacts"].append({**half, **own})
        more = {"built_from": copied, "file": "plans/fp4.plan", "sms": ["sm120"], "sources": {}}
        value["plans"].append({**plan, **more})

    with_manifest(own_bundle, add_graph)
    opened = Bundle.open(own_bundle)
    for sms, is_kept in (((), True), (("sm120",), True), (("sm86", "sm120"), True), (("sm86",), False)):
        kept = [artifact.id for artifact in choose_graphs(opened, Keep(("rtx",), (), sms))]
        assert (copied in kept) == is_kept and "decoder.inplace.fp16" in kept
    result = prune(own_bundle, keep=["rtx", "sm86"])
    assert {"onnx/fp4.onnx", "onnx/fp4.data", "plans/fp4.plan"} < set(result.removed)
    with pytest.raises(
        InputError, match=r"keep='nvfp4a16': .* no graphs in that precision for rtx on sm86; it"
    ):
        choose_graphs(opened, Keep(("rtx",), ("nvfp4a16",), ("sm86",)))


def test_graphs_of_other_targets_are_kept_where_a_cpu_runs_them(demo_bundle: Path) -> None:
    opened = Bundle.open(demo_bundle)

    def choose(artifacts: Collection[str], *keep: str) -> list[str]:
        own = tuple(a for a in opened.manifest.artifacts if a.id in artifacts)
        bundle = Bundle(opened.folder, replace(opened.manifest, artifacts=own, plans=()))
        return [a.id for a in choose_graphs(bundle, parse_keep(keep, bundle))]

    halves = ["decoder.portable.fp16", "decoder.inplace.fp16"]
    assert choose(halves[1:], "cpu") == halves[1:]
    assert choose(halves, "cpu") == choose(halves, "cpu", "fp16") == halves[:1]
    # A GPU's fp16 is meant where it is named too, and a CPU has another precision.
    everything = ["decoder.ort.fp32", *halves]
    assert choose(everything, "fp32", "fp16", "cpu", "rtx") == ["decoder.ort.fp32", halves[1]]
    assert choose(everything, "fp16", "cpu", "rtx") == halves
    for_plans = [replace(a, precision="nvfp4a16") for a in opened.manifest.artifacts if a.id == halves[1]]
    bundle = Bundle(opened.folder, replace(opened.manifest, artifacts=tuple(for_plans), plans=()))
    with pytest.raises(
        InputError, match=r"keep='cpu': .* has no graphs for that target; it has some for rtx"
    ):
        choose_graphs(bundle, Keep(("cpu",), ()))


def test_explanations_stay_as_long_as_their_weights(explained: Callable[[str], Path], tmp_path: Path) -> None:
    checkpoint = explained("classifier") / "checkpoint"
    bundle = tmp_path / "bundle"
    precisions = ["fp32", "int8"]
    export(checkpoint, bundle, precision=precisions, target=["cpu"], outputs=["explain"], verify="quick")
    graphs = Bundle.open(bundle).manifest.explanations
    kept = shutil.copytree(bundle, tmp_path / "kept")
    prune(kept, keep=["fp32"])
    assert Bundle.open(kept).manifest.explanations == graphs and verify(kept, level="quick").passed
    result = prune(bundle, keep=["int8"])
    assert Bundle.open(bundle).manifest.explanations == ()
    assert {graph.file for graph in graphs} < set(result.removed)
    assert not list(bundle.glob("checks/explain-*")) and verify(bundle).passed


def test_pruning_twice_removes_nothing_more(own_bundle: Path) -> None:
    prune(own_bundle, keep=["cpu"])
    files = list_files(own_bundle)
    again = prune(own_bundle, keep=["cpu"])
    assert again.removed == {} and again.bytes_before == again.bytes_after
    assert list_files(own_bundle) == files


@pytest.mark.parametrize(
    ("keep", "words"),
    [
        (
            "int9",
            r"keep='int9' is no precision, target or GPU; .* has the precisions fp32, fp16, the targets cpu,"
            r" cuda, portable, rtx, and plans for sm75, .*sm121; did you mean 'int8'",
        ),
        ("gpu", "did you mean 'cuda'"),
        ("rtx,RTX 3060", r"keep='RTX 3060' is no .* plans for sm75, .*; did you mean RTX 30 \(sm86\)\?$"),
        ("int4", "keep='int4': .* has no graphs in that precision; it has some in fp32, fp16"),
        ("int4,cpu", "keep='int4': .* has no graphs in that precision for cpu; it has some in fp32, fp16$"),
        ("rtx,sm52", "keep='sm52': .* has no plan for that GPU for rtx; it has sm75, .*sm121$"),
        ("cpu,sm89", "keep='sm89': .* has no plan for that GPU for cpu; it has none$"),
        ("fp32,rtx", "keep='fp32': .* has no graphs in that precision for rtx; it has some in fp16$"),
        ("fp32,cpu,rtx", "keep='fp32,cpu,rtx' leaves nothing that rtx runs: of .* it runs fp16; name one of"),
    ],
)
def test_names_that_leave_nothing_are_refused(own_bundle: Path, keep: str, words: str) -> None:
    before = {name: (own_bundle / name).read_bytes() for name in list_files(own_bundle)}
    with pytest.raises(InputError, match=words):
        prune(own_bundle, keep=keep.split(","))
    assert error_line("prune", own_bundle, "--keep", keep).startswith("error: keep=")
    assert {name: (own_bundle / name).read_bytes() for name in list_files(own_bundle)} == before


def test_a_target_that_the_bundle_has_nothing_for_is_refused(llama_demo_bundle: Path) -> None:
    words = "keep='rtx': .* has no graphs for that target; it has some for cpu"
    with pytest.raises(InputError, match=words):
        choose_graphs(Bundle.open(llama_demo_bundle), Keep(("rtx",), ()))
    words = r"keep=\[\] leaves nothing; .* has: the precisions fp32, int8, int4, the targets cpu$"
    with pytest.raises(InputError, match=words):
        prune(llama_demo_bundle, keep=[])
    assert re.search(words, error_line("prune", llama_demo_bundle, "--keep", " , "))


def test_damaged_golden_data_is_told_and_nothing_is_changed(own_bundle: Path) -> None:
    (golden,) = own_bundle.glob(f"{GOLDEN}*")
    content = bytearray(golden.read_bytes())
    content[len(content) // 2] ^= 1
    golden.write_bytes(content)
    before = (own_bundle / "manifest.json").read_bytes()
    files = list_files(own_bundle)
    with pytest.raises(IntegrityError, match="has changed since it was exported"):
        prune(own_bundle, keep=["cpu"])
    assert (own_bundle / "manifest.json").read_bytes() == before and list_files(own_bundle) == files


PRUNE = """
from planforge.exporter import pruning

def change(folder):
    pruning.prune(folder / "bundle", keep=["fp32", "cpu"])
"""


@pytest.mark.parametrize("how", ["killed", "full"])
def test_stopped_at_every_step_the_bundle_is_whole(
    head_bundle: Callable[[str], Path], tmp_path: Path, how: str
) -> None:
    original = head_bundle("classifier")
    whole = Bundle.open(original).manifest
    for step in range(STEPS):
        shutil.copytree(original, tmp_path / str(step) / "bundle")
    codes = stop_at_every_step(PRUNE, tmp_path, how)
    steps = codes.index(0) if how == "killed" else STEPS
    assert how == "full" or (steps >= 8 and set(codes[:steps]) == {-signal.SIGKILL})
    seen = []
    for step in range(min(steps + 1, STEPS)):
        bundle = tmp_path / str(step) / "bundle"
        opened = Bundle.open(bundle)
        opened.verify_files()
        seen.append(opened.manifest == whole)
        prune(bundle, keep=["fp32", "cpu"])  # mends what was left
        assert [a.id for a in Bundle.open(bundle).manifest.artifacts] == ["encoder.ort.fp32"]
        assert list_files(bundle) == {"manifest.json", *Bundle.open(bundle).manifest.files}
        assert [path.name for path in bundle.parent.iterdir()] == ["bundle"]
    assert set(seen) == {True, False}
    assert how == "full" or seen == sorted(seen, reverse=True)  # one step is the commit


def test_a_bundle_that_was_replaced_meanwhile_is_left_alone(
    own_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from planforge.exporter import pruning

    def replace_meanwhile(bundle: Bundle, keep: Keep) -> Any:
        monkeypatch.undo()
        with_manifest(own_bundle, lambda value: value.update(export_id="another"))
        return choose_graphs(bundle, keep)

    monkeypatch.setattr(pruning, "choose_graphs", replace_meanwhile)
    with pytest.raises(OutputError, match="was exported again, or pruned, meanwhile"):
        prune(own_bundle, keep=["cpu"])
    assert len(Bundle.open(own_bundle).manifest.artifacts) > 1


def test_the_command_says_what_was_removed(own_bundle: Path, tmp_path: Path) -> None:
    other = shutil.copytree(own_bundle, tmp_path / "other")
    (plan,) = Bundle.open(own_bundle).manifest.plans
    sizes = {name: entry.bytes for name, entry in Bundle.open(own_bundle).manifest.files.items()}
    done = planforge("prune", own_bundle, "--keep", "cpu")
    assert done.returncode == 0, done.stderr
    assert f"({sum(sizes.values()):,} bytes)" in done.stdout and "decoder.ort.fp32" in done.stdout
    left = sum(entry.bytes for entry in Bundle.open(own_bundle).manifest.files.values())
    assert f"({left:,} bytes)" in done.stdout and plan.file in done.stdout
    told = json.loads(planforge("prune", other, "--keep", "cpu", "--json").stdout)
    assert told["kept"] == ["decoder.ort.fp32"] and told["removed"][plan.file] == sizes[plan.file]
    assert (told["bytes_before"], told["bytes_after"]) == (sum(sizes.values()), left)
