"""Plans of models that make pictures: built by TensorRT-RTX, and run step by step on an emulated GPU."""

from __future__ import annotations

import dataclasses
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TypedDict

import numpy as np
import pytest

from planforge.exporter import export
from planforge.exporter.errors import BuildOptionError
from planforge.exporter.tensorrt.build import Options
from planforge.exporter.tensorrt.memory import check_plan_memory
from planforge.exporter.tensorrt.plans import build, plan_profiles
from planforge.exporter.tensorrt.profiles import Profile, check_profile, derive_profiles
from planforge.runtime.apps.check.selftest import selftest
from planforge.runtime.backends.plan_compatibility import make_rebuild_command
from planforge.runtime.backends.tensorrt_program import TensorRtProgram
from planforge.runtime.bundle.bundle import Bundle
from planforge.runtime.bundle.manifest import Artifact
from planforge.runtime.errors import InputError, MemoryLimitError
from planforge.runtime.images.image_generator import ImageGenerator
from planforge.runtime.memory_needs import sum_memory

from ...helpers.emulated_gpu import emulated_gpu

GRAPHS = ("text_encoder", "unet", "vae_decoder", "vae_encoder")
USUAL = 8  # height and width of the fixture's latents, of which each is 4 pixels wide
PIXELS = 4
PROMPT = "a red three"


class Size(TypedDict, total=False):
    """The pixels of a picture."""

    height: int
    width: int


@pytest.fixture(scope="module")
def planned(picture_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle with plans for one GPU."""
    pytest.importorskip("tensorrt_rtx")
    folder = tmp_path_factory.mktemp("pictures") / "bundle"
    shutil.copytree(picture_bundle, folder)
    build(folder, target="rtx", sms=["sm86"])
    return folder


def list_graphs(bundle: Path) -> dict[str, Artifact]:
    manifest = Bundle.open(bundle).manifest
    return {graph: manifest.artifact(f"{graph}.portable.fp16") for graph in GRAPHS}


def test_tensorrt_builds_a_plan_of_each_graph(planned: Path) -> None:
    plans = Bundle.open(planned).manifest.plans
    assert sorted(plan.built_from for plan in plans) == sorted(f"{g}.portable.fp16" for g in GRAPHS)
    assert all(plan.sms == ("sm86",) for plan in plans)


def test_weights_that_graphs_share_a_file_of_count_once(planned: Path) -> None:
    manifest = Bundle.open(planned).manifest
    counted = sum(plan.profiles[0]["memory"]["weights"] for plan in manifest.plans)
    stored = manifest.count_weight_bytes(*list_graphs(planned).values())
    assert 0.9 * stored < counted <= stored  # all but the alignment of tensors in the file


@pytest.mark.parametrize("size", [{}, {"height": 40, "width": 48}])
def test_a_step_runs_in_the_profile_of_its_size(planned: Path, size: Size) -> None:
    """On the emulated GPU pictures are those of ONNX Runtime, to the last bit: it computes both."""
    with ImageGenerator.load(planned, backend="ort-cpu", precision="fp16") as model:
        (expected,) = model.generate(PROMPT, seed=3, steps=3, **size)
    with emulated_gpu(planned), ImageGenerator.load(planned, backend="tensorrt-rtx") as model:
        (picture,) = model.generate(PROMPT, seed=3, steps=3, **size)
        unet = model.parts["unet"].program
        assert isinstance(unet, TensorRtProgram)
        assert list(unet.states) == [1 if size else 0]  # the profiles of the usual size, and of any
    np.testing.assert_array_equal(picture.pixels, expected.pixels)


def test_selftest_holds_plans_to_the_limits_of_the_export(planned: Path) -> None:
    with emulated_gpu(planned):
        result = selftest(planned, "tensorrt-rtx")
    assert result.passed
    assert {comparison.artifact for comparison in result.comparisons} == {
        f"{graph}.portable.fp16" for graph in GRAPHS
    }


def test_plans_in_int8_and_fp8_draw_what_their_graphs_draw(picture_bundle: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx")
    folder = tmp_path / "b"
    export(
        picture_bundle.parent / "checkpoint",
        folder,
        target="rtx",
        precision=["int8", "fp8"],
        sms=["sm89"],
        verify="quick",
    )
    manifest = Bundle.open(folder).manifest
    for precision in ("w8a16", "fp8a16"):
        graphs = [manifest.artifact(f"{graph}.portable.{precision}") for graph in GRAPHS]
        assert all(graph.passed for graph in graphs)
        assert {graph.id for graph in graphs} <= {plan.built_from for plan in manifest.plans}
        with ImageGenerator.load(folder, backend="ort-cpu", precision=precision) as model:
            (expected,) = model.generate(PROMPT, seed=3, steps=2)
        with (
            emulated_gpu(folder, sm="sm89"),
            ImageGenerator.load(folder, backend="tensorrt-rtx", precision=precision) as model,
        ):
            (picture,) = model.generate(PROMPT, seed=3, steps=2)
        np.testing.assert_array_equal(picture.pixels, expected.pixels)


def name_lengths(profile: Profile, side: str) -> tuple[int, int, int]:
    name = side if side in profile.axes else f"picture_{side}"
    return profile.axes[name]


def test_profiles_are_of_the_usual_size_and_of_any(picture_bundle: Path) -> None:
    graphs = list_graphs(picture_bundle)
    alone, both = derive_profiles(graphs["text_encoder"])
    assert alone.axes["batch"] == (1, 1, 8)
    assert both.axes["batch"] == (1, 2, 8)  # what leads to a picture, and away from one
    for graph in GRAPHS[1:]:
        usual, others = derive_profiles(graphs[graph])
        assert (usual.name, others.name) == ("usual size", "any size")
        pixels = USUAL * (PIXELS if graph == "vae_encoder" else 1)
        for side in ("height", "width"):
            assert name_lengths(usual, side) == (pixels,) * 3
            low, best, high = name_lengths(others, side)
            assert low < best == pixels < high
        for profile in (usual, others):
            check_profile(profile, graphs[graph])
            assert profile.axes["batch"] == (1, 2 if graph == "unet" else 1, 8)
    assert derive_profiles(graphs["unet"])[0].axes["tokens"] == (16, 16, 16)


def test_sizes_are_given_in_pixels(picture_bundle: Path) -> None:
    graphs = list(list_graphs(picture_bundle).values())
    shapes = [{"height": 64, "width": 48, "batch": 4}]
    for graph, profiles in plan_profiles(graphs, {"height": 128}, Options(opt=shapes)).items():
        if graph.startswith("text_encoder"):
            continue
        usual, others = profiles
        pixel = 1 if graph.startswith("vae_encoder") else PIXELS
        assert name_lengths(usual, "height") == (64 // pixel,) * 3
        assert name_lengths(usual, "width") == (48 // pixel,) * 3
        assert name_lengths(others, "height")[1:] == (64 // pixel, 128 // pixel)
        assert usual.axes["batch"] == (1, 4, 8)


def test_what_is_no_size_is_refused(picture_bundle: Path, demo_bundle: Path) -> None:
    graphs = list(list_graphs(picture_bundle).values())
    for height in (66, 0, 4096):
        with pytest.raises(
            BuildOptionError, match=f"--opt height={height} must be a multiple of 4 from 4 to 512"
        ):
            plan_profiles(graphs, {}, Options(opt=[{"height": height}]))
    with pytest.raises(BuildOptionError, match="--max width=6 must be a multiple of 4"):
        plan_profiles(graphs, {"width": 6}, Options())
    texts = [Bundle.open(demo_bundle).manifest.artifact("decoder.inplace.fp16")]
    with pytest.raises(InputError, match=r"--opt height=\.\.\.: an axis is batch or length"):
        plan_profiles(texts, {}, Options(opt=[{"height": 64}]))


def test_what_fits_a_limit_is_told_in_pixels(picture_bundle: Path) -> None:
    bundle = Bundle.open(picture_bundle)
    graphs = list(list_graphs(picture_bundle).values())

    def derive(lengths: Mapping[str, int]) -> dict[str, tuple[Profile, ...]]:
        return plan_profiles(graphs, lengths, Options())

    with pytest.raises(MemoryLimitError) as caught:
        check_plan_memory(bundle, graphs, {}, derive, 10**9)
    assert "for batch=8,height=512,width=512: " in str(caught.value)
    found = re.search(r"--max height=(\d+),width=(\d+) would fit", str(caught.value))
    assert found is not None and found[1] == found[2]
    side = int(found[1])
    check_plan_memory(bundle, graphs, {"height": side, "width": side}, derive, 10**9)
    with pytest.raises(MemoryLimitError):
        check_plan_memory(bundle, graphs, {"height": side + PIXELS, "width": side + PIXELS}, derive, 10**9)


@pytest.mark.parametrize("graph", GRAPHS)
def test_the_command_that_builds_a_plan_again_has_its_sizes(planned: Path, graph: str) -> None:
    bundle = Bundle.open(planned)
    artifact = bundle.manifest.artifact(f"{graph}.portable.fp16")
    plan = next(plan for plan in bundle.manifest.plans if plan.built_from == artifact.id)
    usual = f"planforge build {planned} --target rtx --sm sm86"
    assert make_rebuild_command(bundle, "tensorrt-rtx", plan=plan) == usual
    if graph == "text_encoder":
        return
    shapes = [{"height": 48, "width": 32}]
    profiles = derive_profiles(artifact, max_height=64, opt=shapes)
    other = dataclasses.replace(plan, profiles=tuple(profile.to_json() for profile in profiles))
    rows = 2 if graph == "unet" else 1
    assert make_rebuild_command(bundle, "tensorrt-rtx", plan=other) == (
        f"{usual} --max height=64 --opt batch={rows},height=48,width=32"
    )


def test_the_precision_that_fits_counts_a_picture_of_the_usual_size(picture_bundle: Path) -> None:
    """Between what int8 and fp32 need lies a limit for which int8 is loaded."""
    manifest = Bundle.open(picture_bundle).manifest
    own = {
        p: [a for a in manifest.artifacts if a.precision == p and a.dialect == "ort"]
        for p in ("fp32", "int8")
    }
    needs = {p: sum_memory(manifest, graphs, 1, 16, widens_half=True) for p, graphs in own.items()}
    assert 0 < needs["fp32"].activations == needs["int8"].activations
    assert needs["int8"].total < needs["fp32"].total
    limit = needs["fp32"].total - 1
    with ImageGenerator.load(picture_bundle, backend="ort-cpu", memory_limit=limit) as model:
        assert model.parts["unet"].artifact.precision == "int8"
        assert len(model.generate(PROMPT, steps=1, seed=0)) == 1
