"""The shapes that plans are tuned for: derived from a graph's axes, free of contradictions, without gaps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planforge.exporter.errors import BuildError, BuildOptionError
from planforge.exporter.graphs import make_artifact
from planforge.exporter.tensorrt import build
from planforge.exporter.tensorrt.profiles import Profile, check_profile, derive_profiles, find_slots
from planforge.exporter.tracing.recipes import RECIPES, TraceOptions
from planforge.models import GPT2Config, TransformerConfig
from planforge.runtime.bundle.manifest import Artifact, Axis, TensorSpec


def gpt2_artifact(dialect: str, batch: int = 3, length: int = 64) -> Artifact:
    config = GPT2Config(n_layer=2, n_embd=64, n_head=4, vocab_size=300, n_positions=length)
    recipe = RECIPES["text-generation"].make_recipes(config, TraceOptions(batch, length))[
        f"decoder.{dialect}"
    ]
    return make_artifact(recipe, "fp16", "onnx/decoder.onnx", "onnx/weights.data")


dialects = st.sampled_from(["inplace", "portable"])
lengths = st.integers(2, 3000)
batches = st.integers(1, 64)


@given(dialects, batches, lengths, st.data())
def test_profiles_are_in_order_within_the_axes_and_sum_up(
    dialect: str, batch: int, length: int, data: st.DataObject
) -> None:
    artifact = gpt2_artifact(dialect, batch, length)
    max_batch = data.draw(st.none() | st.integers(1, batch))
    max_length = data.draw(st.none() | st.integers(2, length))
    profiles = derive_profiles(artifact, max_batch=max_batch, max_length=max_length)
    assert [p.name for p in profiles] == ["prefill", "append", "decode"]
    assert find_slots(profiles) == ((max_length or length) if dialect == "inplace" else None)
    for profile in profiles:
        check_profile(profile, artifact)
        for name, (low, opt, high) in profile.axes.items():
            assert low <= opt <= high
            axis = artifact.axis(name)
            # What is beyond the axis is the corner that no call reaches.
            corner = name == "total" and profile.name == "append"
            assert axis.min <= low and opt <= axis.max and (corner or high <= axis.max)
        if dialect == "portable":
            past, tokens, total = (profile.axes[a] for a in ("past", "tokens", "total"))
            assert total == tuple(p + t for p, t in zip(past, tokens, strict=True))
        for spec in artifact.inputs:
            assert all(len(shape) == len(spec.axes) for shape in profile.list_shapes(spec))


def fits(profile: Profile, **lengths: int) -> bool:
    return all(
        profile.axes[name][0] <= length <= profile.axes[name][2]
        for name, length in lengths.items()
        if name in profile.axes
    )


@given(dialects, batches, lengths, st.data())
def test_every_call_fits_its_profile(
    dialect: str, max_batch: int, max_length: int, data: st.DataObject
) -> None:
    prefill, append, decode = derive_profiles(gpt2_artifact(dialect, max_batch, max_length))
    batch = data.draw(st.integers(1, max_batch))
    tokens = data.draw(st.integers(1, max_length))
    assert fits(prefill, batch=batch, tokens=tokens, rows=batch, past=0, total=tokens)
    part = data.draw(st.integers(1, append.axes["tokens"][2]))
    past = data.draw(st.integers(0, max_length - part))
    assert fits(append, batch=batch, tokens=part, rows=batch, past=past, total=past + part)
    assert fits(append, batch=1, tokens=part, rows=part, past=past, total=past + part)
    past = data.draw(st.integers(1, max_length - 1))
    assert fits(decode, batch=batch, tokens=1, rows=batch, past=past, total=past + 1)


def test_profiles_of_the_usual_shape() -> None:
    prefill, append, decode = derive_profiles(gpt2_artifact("portable", 8, 1024))
    assert prefill.axes["tokens"] == (1, 128, 1024) and prefill.axes["past"] == (0, 0, 0)
    assert append.axes["tokens"] == (1, 128, 256) and append.axes["rows"] == (1, 128, 256)
    assert append.axes["total"] == (1, 256, 1279)
    assert decode.axes == {
        "batch": (1, 1, 8),
        "tokens": (1, 1, 1),
        "rows": (1, 1, 8),
        "past": (1, 128, 1023),
        "total": (2, 129, 1024),
    }
    assert Profile.from_json(append.to_json()) == append


def encoder_artifact(batch: int = 8) -> Artifact:
    axes = (Axis("batch", 1, 4, batch), Axis("tokens", 1, 64, 512))
    return replace(gpt2_artifact("portable"), inputs=(TensorSpec("input_ids", "ids", "int64", axes),))


def test_an_encoder_is_optimized_for_one_text_and_for_a_full_batch() -> None:
    one, full = derive_profiles(encoder_artifact(), max_length=128)
    assert one.axes == {"batch": (1, 1, 8), "tokens": (1, 64, 128)}
    assert full.axes == {"batch": (1, 4, 8), "tokens": (1, 64, 128)}
    assert len(derive_profiles(encoder_artifact(), max_batch=1)) == 1


# The shapes that plans are optimized for


def test_an_encoder_has_a_profile_for_each_shape_that_a_user_gives() -> None:
    shapes = [{"batch": 2, "length": 16}, {"batch": 8}, {"length": 128}, {"batch": 2, "length": 16}]
    found = derive_profiles(encoder_artifact(), opt=shapes)
    assert [profile.axes for profile in found] == [
        {"batch": (1, 2, 8), "tokens": (1, 16, 512)},
        {"batch": (1, 8, 8), "tokens": (1, 64, 512)},
        {"batch": (1, 4, 8), "tokens": (1, 128, 512)},
    ]


@given(dialects, batches, lengths, st.data())
def test_shapes_that_a_user_gives_change_no_range(
    dialect: str, batch: int, length: int, data: st.DataObject
) -> None:
    """What a plan takes does not depend on what it is optimized for."""
    artifact = gpt2_artifact(dialect, batch, length)
    shape = {"batch": data.draw(st.integers(1, batch)), "length": data.draw(st.integers(1, length))}
    usual = derive_profiles(artifact)
    best = derive_profiles(artifact, opt=[shape])
    for before, after in zip(usual, best, strict=True):
        check_profile(after, artifact)
        assert {name: r[::2] for name, r in after.axes.items() if name != "total"} == {
            name: r[::2] for name, r in before.axes.items() if name != "total"
        }
    prefill, append, decode = (profile.axes for profile in best)
    assert prefill["tokens"][1] == shape["length"]
    assert {axes["batch"][1] for axes in (prefill, append, decode)} == {shape["batch"]}
    assert prefill["rows"][1] == decode["rows"][1] == shape["batch"]
    if "past" in decode:
        assert decode["past"][1] == min(shape["length"], decode["past"][2])
    both = derive_profiles(artifact, opt=[{}, shape])
    assert both[:3] == usual and all(profile in both for profile in best)


def test_a_translation_is_optimized_for_sources_of_a_length() -> None:
    shape = {"batch": 2, "length": 16}
    for profile in derive_profiles(transformer_artifact("decoder", "portable"), opt=[shape]):
        assert (profile.axes["sources"][1], profile.axes["batch"][1]) == (2, 2)
        assert (profile.axes["source_tokens"][1], profile.axes["tokens"][1]) == (16, 1)
    (encoder,) = derive_profiles(transformer_artifact("encoder", "portable"), opt=[shape])
    assert encoder.axes == {"batch": (1, 2, 3), "tokens": (1, 16, 32)}


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"opt": [{"batch": 0}]}, "--opt batch=0 is outside of what the graph allows, 1 to 3$"),
        ({"opt": [{}, {"length": -1}]}, "--opt length=-1 is outside of what the graph allows, 1 to 64$"),
        (
            {"opt": [{"batch": 4}]},
            "--opt batch=4 is outside .*, 1 to 3; for more, export again with a larger --max-batch",
        ),
        (
            {"opt": [{"batch": 3}], "max_batch": 2},
            "--opt batch=3 is outside of what --max batch=2 allows, 1 to 2; for more, give a larger --max",
        ),
        (
            {"opt": [{"length": 40}], "max_length": 32},
            "--opt length=40 is outside of what --max length=32 allows, 1 to 32; for more, give",
        ),
        ({"opt": [{"length": "8"}]}, "--opt length=8 is outside of what the graph allows"),
        ({"max_batch": 0}, "--max batch=0 is outside of what the graph allows, 1 to 3$"),
        (
            {"max_batch": 4},
            "--max batch=4 is outside .*, 1 to 3; for more, export again with a larger --max-batch",
        ),
        ({"max_length": 1}, "--max length=1 is outside of what the graph allows, 2 to 64$"),
        (
            {"max_length": 65},
            "--max length=65 is outside .*, 2 to 64; for more, export again with a larger --max-length",
        ),
    ],
)
def test_lengths_outside_the_graphs_range(limits: dict[str, Any], message: str) -> None:
    with pytest.raises(BuildOptionError, match=message):
        derive_profiles(gpt2_artifact("inplace"), **limits)


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"tokens": (4, 2, 8)}, r"'input_ids', axis 'tokens': \(4, 2, 8\) is not in the order"),
        ({"batch": (1, 1, 9)}, r"'input_ids', axis 'batch': \(1, 1, 9\) is not within .* 1..3"),
        ({"total": (1, 1, 64)}, r"'attention_mask', axis 'total'.* must be past \+ tokens"),
        ({"beams": (1, 1, 1)}, "has an axis 'beams'"),
    ],
)
def test_a_bad_profile_is_refused_by_input_axis_and_values(
    axes: dict[str, tuple[int, int, int]], message: str
) -> None:
    artifact = gpt2_artifact("portable")
    decode = derive_profiles(artifact)[2]
    with pytest.raises(BuildError, match=message):
        check_profile(replace(decode, axes={**decode.axes, **axes}), artifact)
    with pytest.raises(BuildError, match="no lengths for axis 'batch' of input 'input_ids'"):
        check_profile(Profile("empty", {}), artifact)


def test_a_plan_needs_a_profile_that_fits_its_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "is_installed", lambda engine: True)
    artifact = gpt2_artifact("portable")
    request = build.PlanRequest(tmp_path / "g.onnx", artifact, [], tmp_path / "g.plan", sms=["sm86"])
    with pytest.raises(BuildError, match="a plan needs at least one profile"):
        build.build_plan(request)
    with pytest.raises(BuildError, match="profile 'empty' has no lengths for axis 'batch'"):
        build.build_plan(replace(request, profiles=[Profile("empty", {})]))


def test_slots_have_one_length_in_a_plan() -> None:
    with pytest.raises(BuildError, match=r"'slots' must have one length .* \[8, 16\]"):
        find_slots([Profile("a", {"slots": (8, 8, 8)}), Profile("b", {"slots": (16, 16, 16)})])


def transformer_artifact(graph: str, dialect: str, batch: int = 3, length: int = 32) -> Artifact:
    sizes: dict[str, Any] = {
        "d_model": 32,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "encoder_heads": 2,
        "decoder_heads": 2,
    }
    config = TransformerConfig(source_vocab_size=50, target_vocab_size=50, max_positions=length, **sizes)
    recipe = RECIPES["translation"].make_recipes(config, TraceOptions(batch, length))[f"{graph}.{dialect}"]
    return make_artifact(recipe, "fp16", f"onnx/{graph}.onnx", "onnx/weights.data")


@pytest.mark.parametrize("dialect", ["inplace", "portable"])
def test_a_batch_of_translations_is_counted_in_sources(dialect: str) -> None:
    """Its rows are beams, of which every source keeps as many as before."""
    artifact = transformer_artifact("decoder", dialect)
    for profile in derive_profiles(artifact):
        assert (profile.axes["sources"][2], profile.axes["batch"][2]) == (3, 24)
    for profile in derive_profiles(artifact, max_batch=2, max_length=16):
        check_profile(profile, artifact)
        assert (profile.axes["sources"][2], profile.axes["batch"][2]) == (2, 16)
        assert profile.axes["source_tokens"][2] == 16
        assert fits(profile, batch=8, sources=2, source_tokens=16, tokens=1, rows=8)
    with pytest.raises(BuildError, match="--max batch=4 is outside of what the graph allows, 1 to 3"):
        derive_profiles(artifact, max_batch=4)


def test_the_encoder_of_a_translation_has_one_profile() -> None:
    (profile,) = derive_profiles(transformer_artifact("encoder", "portable"), max_batch=2, max_length=16)
    assert profile.axes == {"batch": (1, 1, 2), "tokens": (1, 16, 16)}
