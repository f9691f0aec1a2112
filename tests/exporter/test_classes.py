"""Every class that a published folder may name, exported and held against transformers."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentence_transformers
import torch
import transformers
from sentence_transformers.sentence_transformer import modules

from planforge.exporter import export
from planforge.exporter.checkpoints.source import find_demo
from planforge.exporter.errors import CheckpointError
from planforge.exporter.tensorrt import plans
from planforge.runtime import TextEncoder, TextGenerator, Translator
from planforge.runtime.bundle.bundle import Bundle

from ..helpers.encoders import save_tiny_encoder
from ..helpers.graphs import run_graph
from ..helpers.marian import load_marian_reference, write_marian_tokenizer
from ..helpers.models import TINY, random_gpt2, random_marian, tiny_bert, write_wordpiece
from ..helpers.optimums import OPTIMUM_PYTHON
from ..helpers.plans import only

ENCODERS = [
    "BertModel",
    "BertForPreTraining",
    "BertForMaskedLM",
    "BertLMHeadModel",
    "BertForNextSentencePrediction",
    "BertForSequenceClassification",
    "BertForTokenClassification",
    "BertForQuestionAnswering",
    "DistilBertModel",
    "DistilBertForMaskedLM",
    "DistilBertForSequenceClassification",
    "DistilBertForTokenClassification",
    "DistilBertForQuestionAnswering",
    "XLMRobertaForMaskedLM",
    "XLMRobertaForSequenceClassification",
    "XLMRobertaForTokenClassification",
    "XLMRobertaForQuestionAnswering",
    "ModernBertModel",
    "ModernBertForMaskedLM",
    "ModernBertForSequenceClassification",
    "ModernBertForTokenClassification",
    "ModernBertForQuestionAnswering",
]
# One of each kind is exported by default and verified, one as a user exports it; the others in fp32 alone.
VERIFIED = ("BertForMaskedLM", "ModernBertForMaskedLM", "GPT2LMHeadModel", "MarianMTModel")
AS_A_USER = "DistilBertForMaskedLM"
GRAPHS = {"encoder.ort.fp32": 1e-4, "encoder.portable.fp32": 1e-4, "encoder.portable.fp16": 5e-2}
PROMPT = "In the beginning God created the heaven"
SENTENCES = ["Hello world", "it is not the plan"]


@pytest.fixture
def no_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "is_installed", lambda engine: False)


def exported_class(name: str, checkpoint: Path, bundle: Path, **otherwise: Any) -> Path:
    """Export a class's checkpoint, as `VERIFIED` says; where that is in fp32 alone, with more options."""
    if name in VERIFIED:
        return export(checkpoint, bundle, verify="quick").bundle
    return export(checkpoint, bundle, precision=["fp32"], verify=False, **otherwise).bundle


def tiny_encoder(folder: Path, name: str) -> Any:
    """Write a checkpoint of one layer with its tokenizer, and return transformers' model of it."""
    layers = "n_layers" if name.startswith("DistilBert") else "num_hidden_layers"
    write_wordpiece(folder)
    return tiny_bert(folder, name, **{layers: 1})


def test_an_export_by_default_gives_verified_graphs_and_a_plan(tmp_path: Path) -> None:
    """With nothing replaced: tracers of their own, and the TensorRT-RTX that is installed."""
    tiny_encoder(tmp_path / "checkpoint", AS_A_USER)
    result = export(tmp_path / "checkpoint", tmp_path / "bundle")
    assert result.report is not None and result.report.with_pytorch and result.report.passed
    bundle = Bundle.open(tmp_path / "bundle")
    bundle.verify_files()
    assert [artifact.id for artifact in bundle.manifest.artifacts] == list(GRAPHS)
    assert all(artifact.passed for artifact in bundle.manifest.artifacts)
    built = [(plan.engine, plan.built_from) for plan in bundle.manifest.plans]
    is_there = importlib.util.find_spec("tensorrt_rtx") is not None
    assert built == ([("tensorrt-rtx", "encoder.portable.fp16")] if is_there else [])


@pytest.mark.usefixtures("no_plans")
@pytest.mark.parametrize("name", ENCODERS)
def test_every_class_of_encoder_gives_what_transformers_gives(name: str, tmp_path: Path) -> None:
    reference: Any = tiny_encoder(tmp_path / "checkpoint", name)
    checkpoint = tmp_path / "checkpoint"
    bundle = exported_class(name, checkpoint, tmp_path / "bundle", target=["cpu", "portable"])
    manifest = Bundle.open(bundle).manifest
    wanted_graphs = [graph for graph in GRAPHS if name in VERIFIED or graph.endswith("fp32")]
    assert [artifact.id for artifact in manifest.artifacts] == wanted_graphs
    ids = np.array([[2, 20, 33, 40, 57, 3], [2, 71, 8, 3, 0, 0]])
    mask = (ids != 0).astype(np.int64)
    inputs = {"input_ids": ids, "attention_mask": mask}
    if name.startswith("Bert"):
        inputs["token_type_ids"] = np.array([[0, 0, 0, 1, 1, 1], [0, 0, 1, 1, 0, 0]])
    with torch.inference_mode():
        given = {key: torch.from_numpy(array) for key, array in inputs.items()}
        found = reference(**given, output_hidden_states=True)
    wanted = {key: value.numpy() for key, value in found.items() if isinstance(value, torch.Tensor)}
    wanted["last_hidden_state"] = found.hidden_states[-1].numpy()
    rows = np.flatnonzero(mask)
    for artifact in manifest.artifacts:
        computed = run_graph(bundle / artifact.file, **inputs, logit_rows=rows)
        assert len(computed) == len(artifact.outputs)
        for spec, array in zip(artifact.outputs, computed, strict=True):
            expected = wanted[spec.name]
            if spec.role == "masked_lm":
                expected = expected.reshape(-1, expected.shape[-1])[rows]
            elif spec.axis_names()[:2] == ("batch", "tokens"):
                array = array[mask == 1]
                expected = expected[mask == 1]
            assert array.shape == expected.shape
            np.testing.assert_allclose(array, expected, atol=GRAPHS[artifact.id] * np.abs(expected).max())


@pytest.mark.usefixtures("no_plans")
@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "GPT2Model"])
def test_every_class_of_decoder_gives_what_transformers_gives(name: str, tmp_path: Path) -> None:
    shutil.copytree(find_demo("gpt2-demo"), tmp_path / "checkpoint")
    whole = random_gpt2(**TINY | {"vocab_size": 2048, "n_layer": 1})
    saved = whole if name == "GPT2LMHeadModel" else whole.transformer
    saved.save_pretrained(tmp_path / "checkpoint")
    bundle = exported_class(name, tmp_path / "checkpoint", tmp_path / "bundle")
    with TextGenerator.load(bundle) as model:
        ids = model.tokenizer.encode(PROMPT)
        answer = model.generate(PROMPT, max_new_tokens=8)
    with torch.inference_mode():
        logits = whole(torch.tensor([[*ids, *answer.token_ids]])).logits[0, len(ids) - 1 :]
    logprobs = logits.log_softmax(-1)
    tokens = list(answer.token_ids)
    assert logprobs.argmax(-1)[: len(tokens)].tolist() == tokens
    chosen = logprobs[range(len(tokens)), tokens].numpy()
    np.testing.assert_allclose(np.array(answer.logprobs)[: len(tokens)], chosen, atol=1e-3)


@pytest.mark.usefixtures("no_plans")
@pytest.mark.parametrize("name", ["MarianMTModel", "MarianModel"])
def test_every_class_of_translator_gives_what_transformers_gives(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    count = write_marian_tokenizer(folder)
    whole: Any = random_marian(vocab_size=count, encoder_layers=1, decoder_layers=1)
    (whole if name == "MarianMTModel" else whole.model).save_pretrained(folder)
    whole.generation_config.save_pretrained(folder)
    reference: Any = transformers.MarianMTModel.from_pretrained(folder).eval()
    bundle = exported_class(name, folder, tmp_path / "bundle")
    tokenizer: Any = load_marian_reference(folder)
    with Translator.load(bundle) as model:
        for text in SENTENCES:
            ids = tokenizer(text, return_tensors="pt").input_ids
            with torch.inference_mode():
                (wanted,) = reference.generate(ids, num_beams=1, max_new_tokens=8, do_sample=False).tolist()
            found = model.translate(text, num_beams=1, max_new_tokens=8)
            assert list(found.token_ids) == wanted[1 : 1 + len(found.token_ids)] and found.token_ids


def test_what_is_half_a_model_or_a_decoder_in_disguise_is_refused(tmp_path: Path) -> None:
    config = transformers.MarianConfig(vocab_size=60, pad_token_id=59, d_model=32, decoder_layers=1)
    transformers.MarianForCausalLM(config).save_pretrained(tmp_path / "half")
    with pytest.raises(CheckpointError, match="MarianForCausalLM is a part of a model"):
        export(tmp_path / "half", tmp_path / "bundle")
    tiny_bert(tmp_path / "decoder", "BertLMHeadModel", is_decoder=True)
    with pytest.raises(CheckpointError, match="is_decoder=True; only False is supported"):
        export(tmp_path / "decoder", tmp_path / "bundle")


@pytest.mark.usefixtures("no_plans")
@pytest.mark.parametrize(
    ("name", "kind"),
    [("LlamaForCausalLM", "llama"), ("RobertaForMaskedLM", "roberta"), ("T5ForConditionalGeneration", "t5")],
)
def test_classes_that_optimum_exports_are_taken_from_transformers_5(
    name: str, kind: str, exported: Path, tmp_path: Path
) -> None:
    """Verification compares every graph with transformers' model, so that passing it is the proof."""
    source = exported / kind
    checkpoint = Path(shutil.copytree(source, tmp_path / "checkpoint"))
    torch.manual_seed(0)
    model: Any = getattr(transformers, name)(transformers.AutoConfig.from_pretrained(source))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=0.12)
    model.eval().save_pretrained(checkpoint)
    options: dict[str, Any] = {"optimum_python": str(OPTIMUM_PYTHON), "verify": "quick"}
    result = export(checkpoint, tmp_path / "bundle", exporter="optimum", **options)
    assert result.report is not None and result.report.with_pytorch and result.report.passed
    assert {artifact.precision for artifact in result.manifest.artifacts} == {"fp32", "fp16"}


@pytest.mark.usefixtures("no_plans")
def test_roberta_needs_no_optimum(exported: Path, tmp_path: Path) -> None:
    """A tokenizer with <s> and </s>, pairs with two separators, and positions that begin behind padding."""
    result = export(exported / "roberta", tmp_path / "bundle", target=["cpu", "portable"], verify="quick")
    assert result.report is not None and result.report.with_pytorch and result.report.passed
    assert result.manifest.family == "bert"
    config = transformers.AutoConfig.from_pretrained(exported / "roberta")
    reference: Any = transformers.AutoModel.from_pretrained(exported / "roberta").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported / "roberta")
    texts = ["In the beginning", "God created the heaven and the earth."]
    with TextEncoder.load(tmp_path / "bundle", precision="fp32") as encoder:
        assert encoder.defaults.max_length == config.max_position_embeddings - config.pad_token_id - 1
        for text, features in zip(texts, encoder.features(texts), strict=True):
            with torch.no_grad():
                want = reference(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
            np.testing.assert_allclose(features.vectors, want.numpy(), atol=1e-4)


SHORT_AND_LONG = ["the plan is not it", "in paris, and the forge; is it not planned, hello world " * 2, "x"]


def save_sentence_model(folder: Path, kind: str, pooling: Any) -> Any:
    """Write a sentence-transformers folder of a random encoder, and return its vectors of the texts."""
    save_tiny_encoder(folder / "plain", kind)
    parts = [modules.Transformer(str(folder / "plain")), modules.Pooling(32, pooling), modules.Normalize()]
    reference: Any = sentence_transformers.SentenceTransformer(modules=parts, device="cpu")
    reference.save(str(folder / "model"), create_model_card=False)
    return reference.encode(SHORT_AND_LONG, show_progress_bar=False)


@pytest.mark.parametrize(
    ("kind", "pooling"),
    [("XLMRoberta", "cls"), ("XLMRoberta", "lasttoken"), ("ModernBert", "mean")],
)
def test_encoders_that_people_embed_with(kind: str, pooling: str, tmp_path: Path) -> None:
    """Texts longer than ModernBERT's windows, from a bundle, within 1e-5 of sentence-transformers.

    ModernBERT in fp16 and with a plan too.
    """
    want = save_sentence_model(tmp_path, kind, pooling)
    options: dict[str, Any] = {"target": ["cpu", "portable"], "precision": ["fp32"], "verify": "quick"}
    atol = {"encoder.ort.fp32": 1e-5, "encoder.portable.fp32": 1e-5}
    if kind == "ModernBert":
        pytest.importorskip("tensorrt_rtx")
        options = {"target": ["cpu", "portable", "rtx"], "sms": ["sm86"]}
        atol["encoder.portable.fp16"] = 5e-3
    result = export(tmp_path / "model", tmp_path / "bundle", **options)
    assert result.report is not None and result.report.with_pytorch and result.report.passed
    if kind == "ModernBert":
        assert result.manifest.family == "modernbert" and result.manifest.plans
    for graph, limit in atol.items():
        with TextEncoder.load(only(tmp_path / "bundle", tmp_path / graph, graph)) as encoder:
            np.testing.assert_allclose(encoder.embed(SHORT_AND_LONG), want, atol=limit)


@pytest.mark.parametrize("kind", ["XLMRoberta", "ModernBert"])
def test_encoders_in_int8_stay_near(kind: str, tmp_path: Path) -> None:
    """Of random weights int8 loses more than of trained ones: the verdict on those is not asked."""
    want = save_sentence_model(tmp_path, kind, "mean")
    options: dict[str, Any] = {"target": ["cpu"], "precision": ["int8"], "verify": False}
    export(tmp_path / "model", tmp_path / "bundle", **options)
    with TextEncoder.load(tmp_path / "bundle", precision="int8") as encoder:
        vectors = encoder.embed(SHORT_AND_LONG)
    assert ((vectors * want).sum(-1) > 0.98).all()
    assert np.abs(vectors - want).max() > 1e-5  # it is rounded


def test_optimum_exports_a_modernbert_to_the_same_vectors(tmp_path: Path) -> None:
    """A second opinion."""
    if not OPTIMUM_PYTHON.exists():
        pytest.skip("needs make build/optimum-venv/.ready")
    save_tiny_encoder(tmp_path / "plain", "ModernBert")
    options: dict[str, Any] = {"target": ["cpu"], "precision": ["fp32"], "verify": False}
    export(tmp_path / "plain", tmp_path / "ours", **options)
    other: dict[str, Any] = {"exporter": "optimum", "optimum_python": str(OPTIMUM_PYTHON)}
    result = export(tmp_path / "plain", tmp_path / "theirs", **options, **other)
    assert result.manifest.source["exporter"] == "optimum"
    with TextEncoder.load(tmp_path / "ours") as ours, TextEncoder.load(tmp_path / "theirs") as theirs:
        pairs = zip(ours.features(SHORT_AND_LONG), theirs.features(SHORT_AND_LONG), strict=True)
        for one, another in pairs:
            np.testing.assert_allclose(one.vectors, another.vectors, atol=1e-4)
