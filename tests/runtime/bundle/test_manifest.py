from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planforge.runtime.bundle.defaults import EncoderDefaults, GenerationDefaults, SpecialTokens
from planforge.runtime.bundle.manifest import (
    DTYPES,
    Artifact,
    Axis,
    FileEntry,
    Manifest,
    Plan,
    PlanWeight,
    TensorSpec,
)
from planforge.runtime.bundle.pair_templates import PairTemplate, PairTemplates
from planforge.runtime.errors import BundleError, IntegrityError, ManifestError

from ...helpers.manifests import LITERAL, OBJECT, changed, without


def test_the_format_on_disk_is_this_one() -> None:
    assert OBJECT.to_json() == json.dumps(LITERAL, indent=1, ensure_ascii=False) + "\n"


def test_the_literal_manifest_reads_as_what_it_says() -> None:
    assert Manifest.from_json(json.dumps(LITERAL)) == OBJECT


def test_a_default_precision_is_kept_and_is_one_of_the_artifacts() -> None:
    manifest = Manifest.from_json(changed("default_precision", to="fp16"))
    assert manifest == replace(OBJECT, default_precision="fp16")
    assert Manifest.from_json(manifest.to_json()) == manifest
    with pytest.raises(ManifestError, match=r"default_precision 'int8' is not one of \['fp16'\]"):
        Manifest.from_json(changed("default_precision", to="int8"))
    with pytest.raises(ManifestError, match=r"default_precision must be str, but is 8"):
        Manifest.from_json(changed("default_precision", to=8))


@pytest.mark.parametrize("gate", [{}, {"passed": False}, {"passed": 1}, {"passed": "true"}])
def test_only_true_is_passed(gate: dict[str, Any]) -> None:
    assert OBJECT.artifacts[0].passed
    assert not replace(OBJECT.artifacts[0], gate=gate).passed


def test_what_readers_ask_for_is_found() -> None:
    artifact = OBJECT.artifact("decoder.inplace.fp16")
    assert artifact.input("past.0.key").name == "cache.0.key"
    assert artifact.output("present.0.key").axis_names() == ("batch", 12, "slots", 64)
    assert artifact.axis("tokens") == Axis("tokens", 1, 128, 1024)


def test_what_is_not_there_is_named_beside_what_is() -> None:
    artifact = OBJECT.artifacts[0]
    asked: list[tuple[Callable[[str], object], str]] = [
        (OBJECT.artifact, r"'x'.*decoder\.inplace\.fp16"),
        (artifact.input, "no tensor with role 'x'"),
        (artifact.output, "no tensor with role 'x'"),
        (artifact.axis, "no axis 'x'"),
    ]
    for ask, message in asked:
        with pytest.raises(ManifestError, match=message):
            ask("x")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
json_objects = st.dictionaries(st.text(), json_values, max_size=3)
parts = st.text(st.sampled_from("aé漢 -_0"), min_size=1, max_size=4) | st.just("..data")
paths = st.lists(parts, min_size=1, max_size=3).map("/".join)
bounds = st.lists(st.integers(0, 2**40), min_size=3, max_size=3).map(sorted)
axes = st.builds(lambda name, sizes: Axis(name, *sizes), st.text(), bounds) | st.integers(0, 2**31)
specs = st.builds(
    TensorSpec, st.text(), st.text(), st.sampled_from(DTYPES), st.lists(axes, max_size=4).map(tuple)
)
tokens = st.integers(0, 2**31)
words = st.from_regex(r"[A-Za-z0-9_-]+", fullmatch=True)


def make_artifacts(file: st.SearchStrategy[str]) -> st.SearchStrategy[Artifact]:
    """Return graphs whose files are some of the bundle's."""
    tensors = st.lists(specs, max_size=3).map(tuple)
    return st.builds(
        Artifact,
        graph=words,
        dialect=words,
        precision=words,
        file=file,
        data=st.lists(file, max_size=2).map(tuple),
        padding_side=st.sampled_from(["left", "right"]),
        inputs=tensors,
        outputs=tensors,
        aliases=st.dictionaries(st.text(), st.text(), max_size=2),
        constraints=st.lists(st.text(), max_size=2).map(tuple),
        gate=json_objects,
    )


def make_plans(file: st.SearchStrategy[str], graphs: Sequence[Artifact]) -> st.SearchStrategy[Plan]:
    """Return plans of some of the graphs."""
    weights = st.builds(
        PlanWeight,
        dtype=st.sampled_from(DTYPES),
        shape=st.lists(st.integers(1, 2**31), max_size=3).map(tuple),
        file=file,
        offset=st.integers(0, 2**50),
    )
    lengths = st.lists(st.integers(0, 2**31), min_size=3, max_size=3).map(sorted)
    profiles = st.fixed_dictionaries(
        {"name": st.text(), "axes": st.dictionaries(st.text(), lengths, max_size=3)},
        optional={"memory": json_objects},
    )
    return st.builds(
        Plan,
        built_from=st.sampled_from([artifact.id for artifact in graphs]),
        file=file,
        sms=st.lists(st.sampled_from(["sm75", "sm80+", "sm120"]), max_size=3).map(tuple),
        version=st.sampled_from(["1.7.1.116", "10.3.0.26", "10.15.0rc1"]),
        profiles=st.lists(profiles, max_size=2).map(tuple),
        candidates=st.integers(0, 99),
        cuda=st.none() | st.sampled_from(["12.6", "13.0"]),
        weights=st.lists(weights, max_size=2).map(tuple),
        compatible=st.booleans(),
        sources=st.dictionaries(st.text(), st.text(), max_size=2),
    )


generations = st.builds(
    GenerationDefaults,
    eos=st.lists(tokens, max_size=3).map(tuple),
    bos=st.none() | tokens,
    pad=st.none() | tokens,
    max_length=tokens,
    do_sample=st.booleans(),
    temperature=st.none() | st.floats(0.1, 2.0),
    top_k=st.none() | tokens,
)


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    entries = st.builds(FileEntry, sha256=st.text(), bytes=st.integers(0, 2**50))
    files = draw(st.dictionaries(paths, entries, min_size=1, max_size=4))
    file = st.sampled_from(sorted(files))
    graphs = draw(st.lists(make_artifacts(file), min_size=1, max_size=2).map(tuple))
    manifest = st.builds(
        Manifest,
        config=json_objects,
        generation=generations,
        tokenizer=st.fixed_dictionaries({"files": st.lists(file, min_size=1)}, optional={"x": json_values}),
        files=st.just(files),
        artifacts=st.just(graphs),
        plans=st.lists(make_plans(file, graphs), max_size=2).map(tuple),
        source=json_objects,
        tools=st.dictionaries(st.text(), st.text(), max_size=2),
    )
    return draw(manifest)


@settings(deadline=None, max_examples=60)
@given(manifest=manifests())
def test_every_manifest_survives_writing_and_reading(manifest: Manifest) -> None:
    assert Manifest.from_json(manifest.to_json()) == manifest


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("sms", ["86"], r"one of sms is '86', expected something like 'sm86'"),
        ("cuda", "13", r"cuda is '13', expected something like '12\.6'"),
        ("version", "banana", r"version is 'banana', expected something like '10\.3\.0'"),
        ("profiles", [{"axes": {"batch": [2, 1, 3]}}], r"lengths of 'batch' must be \[least, best, most\]"),
        ("built_from", "decoder.x.fp16", r"no artifact 'decoder\.x\.fp16'"),
        ("compatible", "yes", r"compatible must be true or false"),
        (
            "weights",
            [{"name": "w", "dtype": "float16", "shape": [0], "file": "a", "offset": 0}],
            "is not a valid weight",
        ),
        (
            "weights",
            [{"name": "w", "dtype": "int9", "shape": [1], "file": "a", "offset": 0}],
            "is not a valid weight",
        ),
        (
            "weights",
            [{"name": "w", "dtype": "int8", "shape": [1], "file": "a", "offset": 0}],
            "without listing",
        ),
    ],
)
def test_a_passport_that_says_nonsense_is_refused(field: str, value: object, message: str) -> None:
    with pytest.raises(ManifestError, match=message):
        Manifest.from_json(changed("plans", 0, field, to=value))


@pytest.mark.parametrize("name", ["graph", "dialect", "precision"])
@pytest.mark.parametrize("word", ["../../x", "/x", "a.b", "", "a b", "x\n"])
def test_a_word_of_a_file_name_that_could_lead_elsewhere_is_refused(name: str, word: str) -> None:
    with pytest.raises(IntegrityError, match="not of letters, digits, _ and - alone"):
        Manifest.from_json(changed("artifacts", 0, name, to=word))


BAD_PATHS = r"/etc/passwd //host/x .. ../x a/../../x a/.. a\b ..\x C:/x C:x \\host\x . ./ x:stream"


@pytest.mark.parametrize("path", [*BAD_PATHS.split(), "a\0b", ""])
def test_a_path_that_leaves_the_folder_is_refused(path: str) -> None:
    entry = {"sha256": "aa", "bytes": 1}
    for text in (
        changed("files", path, to=entry),
        changed("artifacts", 0, "file", to=path),
        changed("artifacts", 0, "data", to=[path]),
        changed("plans", 0, "file", to=path),
    ):
        with pytest.raises(IntegrityError, match="not a path inside the bundle") as caught:
            Manifest.from_json(text)
        assert repr(path) in str(caught.value)
    with pytest.raises(BundleError):
        Manifest.from_json(changed("tokenizer", "files", to=[path]))


@pytest.mark.parametrize("version", [0, 2, 99])
def test_another_format_is_refused_whatever_else_it_says(version: int) -> None:
    with pytest.raises(ManifestError, match=rf"has format {version};.* reads format 1\. .*export again"):
        Manifest.from_json(json.dumps({"format": version}))


WRONG: list[tuple[tuple[str | int, ...], object, str]] = [
    (("format",), "1", "manifest.format"),
    (("format",), 1.0, "manifest.format"),
    (("format",), True, "manifest.format"),
    (("family",), None, "manifest.family"),
    (("config",), [], "manifest.config"),
    (("generation",), 5, "manifest.generation"),
    (("generation", "eos"), 50256, "generation.eos"),
    (("generation", "eos"), ["50256"], "generation.eos"),
    (("generation", "eos"), [1.5], "generation.eos"),
    (("generation", "eos"), [None], "generation.eos"),
    (("generation", "bos"), "x", "generation.bos"),
    (("generation", "max_length"), None, "generation.max_length"),
    (("tokenizer",), "tokenizer.json", "manifest.tokenizer"),
    (("tokenizer", "files"), 5, "tokenizer.files"),
    (("tokenizer", "files"), "tokenizer.json", "tokenizer.files"),
    (("tokenizer", "files"), [5], "tokenizer.files"),
    (("tokenizer", "files"), [], "tokenizer.files is empty"),
    (("files",), [], "manifest.files"),
    (("files", "tokenizer.json"), "dd", "file 'tokenizer.json'"),
    (("files", "tokenizer.json", "bytes"), "0", "file 'tokenizer.json'.bytes"),
    (("files", "tokenizer.json", "sha256"), 5, "file 'tokenizer.json'.sha256"),
    (("artifacts",), {}, "manifest.artifacts"),
    (("artifacts", 0), "decoder", "artifact"),
    (("artifacts", 0, "opset"), "24", "artifact.opset"),
    (("artifacts", 0, "file"), 5, "artifact.file"),
    (("artifacts", 0, "data"), "onnx/weights.data", "artifact.data"),
    (("artifacts", 0, "data"), [5], "artifact.data"),
    (("artifacts", 0, "aliases"), [], "artifact.aliases"),
    (("artifacts", 0, "aliases"), {"present.0.key": 5}, "artifact.aliases"),
    (("artifacts", 0, "constraints"), [5], "artifact.constraints"),
    (("artifacts", 0, "gate"), True, "artifact.gate"),
    (("artifacts", 0, "inputs", 0), [], "tensor"),
    (("artifacts", 0, "inputs", 0, "name"), 5, "tensor.name"),
    (("artifacts", 0, "inputs", 0, "axes"), {}, "tensor.axes"),
    (("artifacts", 0, "inputs", 0, "dtype"), "float64", "'float64'"),
    *(
        (("artifacts", 0, "inputs", 0, "axes", 0), axis, "axis")
        for axis in (
            ["b", 1, 2],
            ["b", 1, 2, 3, 4],
            [5, 1, 2, 3],
            ["b", "1", "x", 3],
            ["b", 1.5, 2, 3],
            ["b", 1, 2, True],
            ["b", 1, 2, 2.5],
            ["b", 1, None, 3],
            *("b", None, 1.5, True, -1),
        )
    ),
    (("plans",), 5, "manifest.plans"),
    (("plans", 0, "sms"), [75], "plan.sms"),
    (("plans", 0, "profiles"), [5], "plan.profiles"),
    (("source",), "gpt2", "manifest.source"),
    (("tools",), {"torch": 2}, "manifest.tools"),
]


@pytest.mark.parametrize(("path", "value", "name"), WRONG, ids=lambda value: str(value)[:60])
def test_a_value_of_the_wrong_type_is_named(path: tuple[str | int, ...], value: object, name: str) -> None:
    with pytest.raises(BundleError) as caught:
        Manifest.from_json(changed(*path, to=value))
    message = str(caught.value)
    assert name in message and "\n" not in message and len(message) < 300


@pytest.mark.parametrize(
    "path",
    [("format",), ("family",), ("files",), ("artifacts",), ("artifacts", 0, "inputs", 1, "role")],
)
def test_a_missing_key_is_named(path: tuple[str | int, ...]) -> None:
    with pytest.raises(ManifestError, match=rf"\.{path[-1]} must be .*, but is missing"):
        Manifest.from_json(without(*path))


@pytest.mark.parametrize("sizes", [(2, 1, 3), (1, 3, 2), (3, 2, 1), (-1, 0, 1)])
def test_an_axis_out_of_order_is_refused(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(ManifestError, match=r"'tokens'.*not in order"):
        Manifest.from_json(changed("artifacts", 0, "inputs", 0, "axes", to=[["tokens", *sizes]]))


@pytest.mark.parametrize("name", [name for name in LITERAL["files"]])
def test_a_file_that_is_used_needs_a_hash(name: str) -> None:
    with pytest.raises(ManifestError, match=f"uses '{name}' without listing its hash"):
        Manifest.from_json(without("files", name))


def test_unknown_keys_and_files_that_nothing_names_are_ignored() -> None:
    """So a later version may add to the format without a new number."""
    value = copy.deepcopy(LITERAL)
    value["files"]["golden.npz"] = {"sha256": "ff", "bytes": 1}
    read = Manifest.from_json(json.dumps(value))
    places = [value, value["generation"], value["artifacts"][0], value["plans"][0]]
    for place in [*places, value["artifacts"][0]["inputs"][0], value["files"]["golden.npz"]]:
        place["later"] = {"x": 1}
    assert Manifest.from_json(json.dumps(value)) == read
    assert (read.artifacts, read.plans) == (OBJECT.artifacts, OBJECT.plans)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"format": 1} x', "[" * 100_000])
def test_what_is_no_json_object_is_refused(text: str) -> None:
    with pytest.raises(ManifestError, match=r"manifest\.json"):
        Manifest.from_json(text)


OWN_FRAMES = (SpecialTokens((1,), (), (7,), 0), SpecialTokens((1,), (1,), (7,), 0))


def write_encoder(**changes: Any) -> dict[str, Any]:
    """An encoder's defaults as a manifest has them, whose tokenizer frames texts in its own way."""
    defaults = EncoderDefaults(64, {}, framed="own", frames=OWN_FRAMES, segments=False)
    written: dict[str, Any] = json.loads(json.dumps(asdict(defaults)))
    return written | changes


def test_frames_of_a_tokenizers_own_survive_writing_and_reading() -> None:
    read = EncoderDefaults.from_json(write_encoder())
    assert read.frames == OWN_FRAMES
    assert read.make_special_tokens() == OWN_FRAMES[0]
    assert read.make_special_tokens(is_pair=True) == OWN_FRAMES[1]


@pytest.mark.parametrize(
    "frames", [None, [], [{}], [{}, {}, {}], [{"prefix": 1}, {}], [{}, {"suffix": ["a"]}], "ab"]
)
def test_frames_that_cannot_be_are_refused(frames: object) -> None:
    with pytest.raises(ManifestError, match=r"encoder\.frames|frames"):
        EncoderDefaults.from_json(write_encoder(frames=frames))


PAIRS = PairTemplates(
    PairTemplate(("Q ", " D ", ""), ("query", "document"), ("query",)),
    PairTemplate(("", " Q ", " D ", ""), ("prompt", "query", "document")),
)


@pytest.mark.parametrize("pairs", [None, PAIRS, PairTemplates(PAIRS.plain)])
def test_what_writes_pairs_survives_writing_and_reading(pairs: PairTemplates | None) -> None:
    written = json.loads(json.dumps(None if pairs is None else asdict(pairs)))
    assert EncoderDefaults.from_json(write_encoder(pairs=written)).pairs == pairs
    assert PAIRS.plain.fill({"query": " a ", "document": " b "}) == "Q a D  b "


@pytest.mark.parametrize(
    "plain",
    [None, {}, {"texts": ["a"], "slots": ["query"]}, {"texts": ["a", "b"], "slots": ["system"]}],
)
def test_templates_of_pairs_that_cannot_be_are_refused(plain: object) -> None:
    with pytest.raises(ManifestError, match=r"encoder\.pairs"):
        EncoderDefaults.from_json(write_encoder(pairs={"plain": plain}))
