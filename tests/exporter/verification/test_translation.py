"""Exports of encoder-decoders: what is in them, and which faults their verification catches."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest

from planforge.exporter import export, verify
from planforge.exporter.checkpoints.checkpoint import Checkpoint
from planforge.exporter.checkpoints.source import Source, find_demo
from planforge.exporter.errors import CheckpointError
from planforge.exporter.verification import verify as verify_module
from planforge.models import load_model
from planforge.runtime.apps.check import translator
from planforge.runtime.bundle.bundle import Bundle
from planforge.runtime.decoding.beam import Hypothesis
from planforge.runtime.decoding.decoder import DecoderRun
from planforge.runtime.errors import InputError, TokenizerError

from ...helpers.graphs import nodes, replace_graph
from ...helpers.models import edit_json

ENCODER = "encoder.portable.fp32"
DECODER = "decoder.portable.fp32"


@pytest.fixture
def own(marian_bundle: Path, tmp_path: Path) -> Path:
    """The portable fp32 graphs of `marian_bundle`, to damage."""
    bundle = Path(shutil.copytree(marian_bundle, tmp_path / "bundle"))
    artifacts = json.loads((bundle / "manifest.json").read_text(encoding="utf-8"))["artifacts"]
    kept = [a for a in artifacts if a["precision"] == "fp32" and a["dialect"] == "portable"]
    edit_json(bundle / "manifest.json", artifacts=kept, plans=[])
    return bundle


@pytest.fixture
def marian(marian_bundle: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoint of `marian_bundle`, to change."""
    return Path(shutil.copytree(marian_bundle.parent / "marian", tmp_path / "marian"))


def checkpoint_of(folder: Path, **choices: Any) -> Checkpoint:
    return Checkpoint(Source("folder", str(folder), folder), **choices)


def test_the_cases(marian_bundle: Path) -> None:
    parity = next((marian_bundle / "checks").glob("parity-*.json"))
    report = json.loads(parity.read_text(encoding="utf-8"))
    assert report["passed"] and report["with_pytorch"]
    cases = {(c["artifact"], c["case"]) for c in report["comparisons"]}
    graphs = {("ort", "fp32")} | {(d, p) for d in ("portable", "inplace") for p in ("fp32", "fp16")}
    for dialect, precision in graphs:
        encoder = "portable" if dialect == "inplace" else dialect
        for case in ("one by one", "3 sources, padded", "1 token", "64 tokens"):
            assert (f"encoder.{encoder}.{precision}", case) in cases
        for case in (
            *("decode, batch 1", "at once, batch 1", "greedy, 3 sources, padded"),
            *("full target of 64 tokens", "4 beams, 2 sources, padded"),
        ):
            assert (f"decoder.{dialect}.{precision}", case) in cases
    executed = {c["artifact"] for c in report["comparisons"] if c["backend"].startswith("node by node")}
    assert executed == {"encoder.portable.fp16", "decoder.portable.fp16", "decoder.inplace.fp16"}


def test_the_graphs_share_one_file_and_no_weight_is_stored_twice(marian_bundle: Path) -> None:
    bundle = Bundle.open(marian_bundle)
    model = load_model(marian_bundle.parent / "marian")
    tensors = {id(t): t.numel() for t in [*model.parameters(), *model.buffers()]}
    for precision, size in (("fp32", 4), ("fp16", 2)):
        artifacts = [a for a in bundle.manifest.artifacts if a.precision == precision]
        graphs = {"encoder.portable", "decoder.portable", "decoder.inplace"}
        ort = {"encoder.ort", "decoder.ort"} if precision == "fp32" else set()
        assert {a.id.removesuffix(f".{precision}") for a in artifacts} == graphs | ort
        (data,) = {name for a in artifacts for name in a.data}
        assert bundle.manifest.files[data].bytes < 1.02 * size * sum(tensors.values())
    assert sum(p.suffix == ".data" for p in (marian_bundle / "onnx").iterdir()) == 2


def test_plans_of_both_graphs(marian_bundle: Path) -> None:
    plans = Bundle.open(marian_bundle).manifest.plans
    assert [plan.built_from for plan in plans] == ["encoder.portable.fp16", "decoder.inplace.fp16"]
    for plan in plans:
        assert (marian_bundle / plan.file).stat().st_size > 100_000
        assert "sm89" in plan.sms
    assert [profile["name"] for profile in plans[1].profiles] == ["prefill", "append", "decode"]


def swap_keys_and_values(model: ir.Model) -> None:
    key, value = model.graph.outputs[:2]
    names = key.name, value.name
    model.graph.outputs[0], model.graph.outputs[1] = value, key
    key.name = "swapped"
    value.name = names[0]
    key.name = names[1]


def change_epsilon(model: ir.Model) -> None:
    nodes(model, "LayerNormalization")[1].attributes["epsilon"] = ir.AttrFloat32("epsilon", 1e-3)


def drop_the_source_mask(model: ir.Model) -> None:
    """The Where whose condition comes from the source's mask alone."""
    unsqueezed = {node.outputs[0] for node in nodes(model, "Unsqueeze")}
    node = next(node for node in nodes(model, "Where") if node.inputs[0] in unsqueezed)
    node.replace_input_with(2, node.inputs[1])


def shift_the_logits_bias(model: ir.Model) -> None:
    (gemm,) = nodes(model, "Gemm")
    bias = gemm.inputs[2]
    assert bias is not None and bias.const_value is not None
    shifted = bias.const_value.numpy().copy()
    shifted[7] += 0.05
    bias.const_value = ir.tensor(shifted, name=bias.name)


def read_values_of_another_layer(model: ir.Model) -> None:
    layers = {value.name: value for value in model.graph.inputs}
    ((reader, index),) = layers["cross.1.value"].uses()
    reader.replace_input_with(index, layers["cross.0.value"])


FAULTS = [
    (ENCODER, swap_keys_and_values),
    (ENCODER, change_epsilon),
    (ENCODER, drop_the_source_mask),
    (DECODER, drop_the_source_mask),
    (DECODER, shift_the_logits_bias),
    (DECODER, read_values_of_another_layer),
]


@pytest.mark.parametrize(("artifact", "fault"), FAULTS)
def test_golden_data_catches_planted_faults(
    own: Path, artifact: str, fault: Callable[[ir.Model], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify_module, "find_recorded_source", lambda bundle: None)
    replace_graph(own, artifact, fault)
    report = verify(own, only=[artifact])
    assert not report.with_pytorch
    failed = [c for c in report.comparisons if not c.passed]
    assert artifact in {c.artifact for c in failed}
    if fault is drop_the_source_mask:  # only padding shows it
        assert all("padded" in c.case for c in failed)


@pytest.mark.parametrize("with_pytorch", [False, True])
def test_attention_of_another_layer_is_caught(
    dates_bundle: Path, tmp_path: Path, with_pytorch: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = Path(shutil.copytree(dates_bundle, tmp_path / "bundle"))
    artifacts = json.loads((bundle / "manifest.json").read_text(encoding="utf-8"))["artifacts"]
    edit_json(bundle / "manifest.json", artifacts=[a for a in artifacts if a["precision"] == "fp32"])
    if not with_pytorch:
        monkeypatch.setattr(verify_module, "find_recorded_source", lambda bundle: None)
    options: dict[str, Any] = {"only": [DECODER], "level": "quick"}
    assert verify(bundle, **options).passed

    def swap(model: ir.Model) -> None:
        at = [i for i, v in enumerate(model.graph.outputs) if str(v.name).startswith("cross_attentions")]
        one, other = (model.graph.outputs[i] for i in at)
        model.graph.outputs[at[0]], model.graph.outputs[at[1]] = other, one
        names = one.name, other.name
        one.name = "swapped"
        other.name = names[0]
        one.name = names[1]

    replace_graph(bundle, DECODER, swap)
    failed = [c for c in verify(bundle, **options).comparisons if not c.passed]
    assert [c.case for c in failed] == ["attention, 2 rows of a source"]


def test_targets_that_golden_data_does_not_know_are_scored(
    own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify_module, "find_recorded_source", lambda bundle: None)
    nonsense = Hypothesis((3, 4, 5, 0), 0.0, "eos")
    monkeypatch.setattr(
        translator, "search_beams", lambda engine, case_set, case, *_: [[nonsense]] * len(case.rows)
    )
    failed = [c for c in verify(own).comparisons if not c.passed]
    assert [c.case for c in failed] == ["4 beams, 2 sources, padded"]
    assert any("score_error is" in failure for failure in failed[0].failures)


def test_pytorch_catches_a_cache_whose_rows_stay_where_they_are(
    own: Path, marian_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_copies(self: DecoderRun, copies: Sequence[tuple[int, int]]) -> None: ...

    monkeypatch.setattr(DecoderRun, "copy_rows", no_copies)
    report = verify(own, source=marian_bundle.parent / "marian", level="quick")
    assert report.with_pytorch
    failed = [c for c in report.comparisons if not c.passed]
    assert [c.case for c in failed] == ["4 beams, 2 sources, padded"]
    assert any("score_error" in failure for failure in failed[0].failures)


def test_fp16_alone_and_the_smallest_sizes(tmp_path: Path) -> None:
    options: dict[str, Any] = {"precision": ["fp16"], "target": ["portable"], "verify": "quick"}
    bundle = export("transformer-demo", tmp_path / "bundle", max_batch=1, max_length=8, **options).bundle
    artifacts = Bundle.open(bundle).manifest.artifacts
    assert [artifact.id for artifact in artifacts] == ["encoder.portable.fp16", "decoder.portable.fp16"]
    assert all(artifact.gate["passed"] for artifact in artifacts)


def test_generation_settings_are_kept(marian: Path) -> None:
    generation: dict[str, Any] = {
        **{"num_beams": 6, "length_penalty": 0.8, "early_stopping": True, "no_repeat_ngram_size": 3},
        **{"min_length": 3, "max_length": 20, "forced_bos_token_id": 5, "bad_words_ids": [[9], [4]]},
        **{"renormalize_logits": True, "repetition_penalty": 1.3},
    }
    edit_json(marian / "generation_config.json", **generation)
    found = checkpoint_of(marian).generation
    assert found is not None
    assert (found.num_beams, found.length_penalty, found.early_stopping) == (6, 0.8, True)
    assert (found.no_repeat_ngram_size, found.min_new_tokens, found.max_new_tokens) == (3, 2, 19)
    assert (found.forced_bos, found.forced_eos, found.suppressed, found.eos) == (5, 0, (4, 9), (0,))
    assert found.renormalize and found.source_eos == 0 and found.repetition_penalty == 1.3
    edit_json(marian / "generation_config.json", max_new_tokens=7, min_new_tokens=1, eos_token_id=[5, 0])
    found = checkpoint_of(marian).generation
    assert found is not None and (found.min_new_tokens, found.max_new_tokens) == (1, 7)
    assert (found.eos, found.source_eos) == ((5, 0), 0)  # sources end as MarianTokenizer ends them


def test_config_json_counts_where_there_is_no_generation_config(marian: Path) -> None:
    edit_json(marian / "generation_config.json", forced_eos_token_id=...)
    edit_json(marian / "config.json", num_beams=5, forced_eos_token_id=3)
    found = checkpoint_of(marian).generation
    assert found is not None and (found.num_beams, found.forced_eos, found.eos) == (1, None, (0,))
    (marian / "generation_config.json").unlink()
    found = checkpoint_of(marian).generation
    assert found is not None and (found.num_beams, found.forced_eos, found.eos) == (5, 3, (0,))


def test_settings_that_are_left_out_are_told(marian: Path, caplog: pytest.LogCaptureFixture) -> None:
    edit_json(
        marian / "generation_config.json", encoder_no_repeat_ngram_size=3, num_beam_groups=1, do_sample=False
    )
    with caplog.at_level(logging.WARNING, "planforge"):
        checkpoint_of(marian)
    assert ["encoder_no_repeat_ngram_size=3" in record.getMessage() for record in caplog.records] == [True]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"decoder_start_token_id": ...}, "decoder_start_token_id missing"),
        ({"eos_token_id": ...}, "eos_token_id missing"),
        ({"decoder_start_token_id": 5000}, "decoder_start_token_id=5000 is not in the target's vocabulary"),
        ({"bad_words_ids": [[]]}, "bad_words_ids has \\[\\], not a list of token ids"),
        ({"forced_eos_token_id": [0, 1]}, "only one token is supported"),
        ({"early_stopping": "soon"}, "early_stopping is 'soon'"),
        ({"early_stopping": 1}, "early_stopping is 1, not true or false"),
        ({"length_penalty": "high"}, "length_penalty is 'high', not a number"),
        ({"length_penalty": float("nan")}, "length_penalty is nan"),
        ({"num_beams": 2.7}, "num_beams is 2.7, not an integer"),
        ({"num_beams": float("inf")}, "num_beams is inf, not an integer"),
        ({"num_beams": 0}, "num_beams is 0"),
        ({"no_repeat_ngram_size": -1}, "no_repeat_ngram_size is -1"),
        ({"forced_eos_token_id": 99999}, "forced_eos_token_id=99999 is not in the target's vocabulary"),
        ({"min_length": 40}, "min_new_tokens is 39; it must be at most max_new_tokens"),
    ],
)
def test_bad_generation_settings(marian: Path, changes: dict[str, Any], message: str) -> None:
    gone = {name: ... for name in changes}
    edit_json(marian / "config.json", **gone)
    edit_json(marian / "generation_config.json", **changes)
    with pytest.raises(CheckpointError, match=message):
        checkpoint_of(marian)


@pytest.mark.parametrize("name", ["source.spm", "target.spm", "vocab.json"])
def test_missing_tokenizers(marian: Path, name: str) -> None:
    (marian / name).unlink()
    with pytest.raises(CheckpointError, match=name.replace("source.spm", "tokenizer.source.json")):
        checkpoint_of(marian)


def test_source_and_target_may_number_their_tokens_differently(tmp_path: Path) -> None:
    """The source's end token is looked up by its spelling, not taken from the target."""
    folder = Path(shutil.copytree(find_demo("transformer-demo"), tmp_path / "demo"))
    content = json.loads((folder / "tokenizer.source.json").read_text(encoding="utf-8"))
    vocab = content["model"]["vocab"]
    other = next(token for token, number in vocab.items() if number == 5)
    vocab["</s>"], vocab[other] = 5, vocab["</s>"]
    for token in content["added_tokens"]:
        token["id"] = vocab[token["content"]]
    edit_json(folder / "tokenizer.source.json", **content)
    found = checkpoint_of(folder).generation
    assert found is not None and (found.source_eos, found.eos) == (5, (1,))


def test_a_tokenizer_without_an_unknown_token(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(find_demo("transformer-demo"), tmp_path / "demo"))
    content = json.loads((folder / "tokenizer.source.json").read_text(encoding="utf-8"))
    content["model"]["unk_token"] = "<nothing>"
    edit_json(folder / "tokenizer.source.json", **content)
    with pytest.raises(TokenizerError, match=r"demo/tokenizer\.source\.json is unusable"):
        checkpoint_of(folder)


def test_a_vocabulary_that_is_not_the_models(marian: Path) -> None:
    config = json.loads((marian / "config.json").read_text(encoding="utf-8"))
    edit_json(marian / "config.json", vocab_size=config["vocab_size"] - 10)
    with pytest.raises(CheckpointError, match=r"vocab_size is 252, the embedding has 262 rows"):
        checkpoint_of(marian)


def test_unknown_outputs_and_lengths(marian: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="output 'hidden_states' is not cross_attentions"):
        export(marian, tmp_path / "bundle", outputs=["hidden_states"])
    with pytest.raises(InputError, match="max_length=65 must be from 4 to the model's context of 64"):
        export(marian, tmp_path / "bundle", max_length=65)
    assert not (tmp_path / "bundle").exists()
