"""Every class that a published folder may name, exported by default and held against transformers."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
import transformers

from planforge.exporter import export, onnx_export, plans
from planforge.exporter.errors import CheckpointError
from planforge.exporter.recipes import Choices
from planforge.exporter.source import demo_folder
from planforge.models.checkpoint import describe
from planforge.runtime import TextGenerator, Translator
from planforge.runtime.bundle.bundle import Bundle

from .conftest import OPTIMUM_PYTHON
from .helpers_graphs import run_graph
from .helpers_marian import marian_witness, write_marian_tokenizer
from .helpers_models import TINY, random_gpt2, random_marian, tiny_bert, write_wordpiece

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
]
VERIFIED = ("BertForMaskedLM", "DistilBertForMaskedLM", "GPT2LMHeadModel", "MarianMTModel")
GRAPHS = {"encoder.ort.fp32": 1e-4, "encoder.portable.fp32": 1e-4, "encoder.portable.fp16": 5e-2}
PROMPT = "In the beginning God created the heaven"
SENTENCES = ["Hello world", "it is not the plan"]


@pytest.fixture(autouse=True)
def trace_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trace in this process and build no plan: the same graphs, in a third of the time."""

    def trace_recipes(
        checkpoint: Path, choices: Choices, paths: Mapping[str, Path], beside: Callable[[], Any]
    ) -> tuple[dict[str, ir.Model], Any]:
        sizes = [str(choices.max_batch), str(choices.max_length), ",".join(choices.outputs)]
        for recipe, path in paths.items():
            onnx_export.main([str(checkpoint), recipe, *sizes, str(path)])
        graphs = {recipe: ir.load(path) for recipe, path in paths.items()}
        for path in paths.values():
            path.unlink()
        return graphs, beside()

    monkeypatch.setattr(onnx_export, "trace_recipes", trace_recipes)
    monkeypatch.setattr(plans, "is_installed", lambda engine: False)


@pytest.mark.parametrize("name", ENCODERS)
def test_every_class_of_encoder_gives_what_transformers_gives(name: str, tmp_path: Path) -> None:
    reference: Any = tiny_bert(tmp_path / "checkpoint", name)
    write_wordpiece(tmp_path / "checkpoint")
    bundle = export(tmp_path / "checkpoint", tmp_path / "bundle", verify=name in VERIFIED).bundle
    manifest = Bundle.open(bundle).manifest
    assert [artifact.id for artifact in manifest.artifacts] == list(GRAPHS)
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
                array, expected = array[mask == 1], expected[mask == 1]
            assert array.shape == expected.shape
            np.testing.assert_allclose(array, expected, atol=GRAPHS[artifact.id] * np.abs(expected).max())


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "GPT2Model"])
def test_every_class_of_decoder_gives_what_transformers_gives(name: str, tmp_path: Path) -> None:
    shutil.copytree(demo_folder("gpt2-demo"), tmp_path / "checkpoint")
    whole = random_gpt2(**TINY | {"vocab_size": 2048})
    saved = whole if name == "GPT2LMHeadModel" else whole.transformer
    saved.save_pretrained(tmp_path / "checkpoint")
    bundle = export(tmp_path / "checkpoint", tmp_path / "bundle", verify=name in VERIFIED).bundle
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


@pytest.mark.parametrize("name", ["MarianMTModel", "MarianModel"])
def test_every_class_of_translator_gives_what_transformers_gives(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    count = write_marian_tokenizer(folder)
    whole: Any = random_marian(vocab_size=count)
    (whole if name == "MarianMTModel" else whole.model).save_pretrained(folder)
    whole.generation_config.save_pretrained(folder)
    reference: Any = transformers.MarianMTModel.from_pretrained(folder).eval()
    bundle = export(folder, tmp_path / "bundle", verify=name in VERIFIED).bundle
    tokenizer: Any = marian_witness(folder)
    with Translator.load(bundle) as model:
        for text in SENTENCES:
            ids = tokenizer(text, return_tensors="pt").input_ids
            with torch.inference_mode():
                (wanted,) = reference.generate(ids, num_beams=1, max_new_tokens=8, do_sample=False).tolist()
            found = model.translate(text, num_beams=1, max_new_tokens=8)
            assert list(found.token_ids) == wanted[1 : 1 + len(found.token_ids)] and found.token_ids


@pytest.mark.parametrize(
    ("name", "model_type", "part"),
    [
        ("BertForMultipleChoice", "bert", "BertModel"),
        ("DistilBertForMultipleChoice", "distilbert", "DistilBertModel"),
        ("GPT2DoubleHeadsModel", "gpt2", "GPT2LMHeadModel"),
        ("GPT2ForSequenceClassification", "gpt2", "GPT2LMHeadModel"),
        ("GPT2ForTokenClassification", "gpt2", "GPT2LMHeadModel"),
        ("GPT2ForQuestionAnswering", "gpt2", "GPT2LMHeadModel"),
    ],
)
def test_other_classes_are_refused_by_name_with_the_part_that_can_be_exported(
    name: str, model_type: str, part: str, tmp_path: Path
) -> None:
    """And transformers does make that part of such a folder, as the message says."""
    config: Any = getattr(transformers, f"{name.partition('For')[0].partition('Double')[0]}Config")
    sizes: dict[str, Any] = {"bert": {"num_hidden_layers": 1, "hidden_size": 24, "num_attention_heads": 2}}
    small = sizes.get(
        model_type, {"n_layers": 1, "dim": 24, "n_heads": 2, "n_layer": 1, "n_embd": 24, "n_head": 2}
    )
    getattr(transformers, name)(config(vocab_size=96, **small)).save_pretrained(tmp_path / "whole")
    message = f"{name} is not exported; without its head it is a {part}, which is: python -c .*{part} as M"
    with pytest.raises(CheckpointError, match=message):
        export(tmp_path / "whole", tmp_path / "bundle")
    getattr(transformers, part).from_pretrained(tmp_path / "whole").save_pretrained(tmp_path / "part")
    description = describe(tmp_path / "part")
    assert description.config_json["architectures"] == [part]


def test_what_is_half_a_model_or_a_decoder_in_disguise_is_refused(tmp_path: Path) -> None:
    config = transformers.MarianConfig(vocab_size=60, pad_token_id=59, d_model=32, decoder_layers=1)
    transformers.MarianForCausalLM(config).save_pretrained(tmp_path / "half")
    with pytest.raises(CheckpointError, match="MarianForCausalLM is a part of a model"):
        export(tmp_path / "half", tmp_path / "bundle")
    tiny_bert(tmp_path / "decoder", "BertLMHeadModel", is_decoder=True)
    with pytest.raises(CheckpointError, match="is_decoder=True; only False is supported"):
        export(tmp_path / "decoder", tmp_path / "bundle")


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
    result = export(checkpoint, tmp_path / "bundle", optimum_python=str(OPTIMUM_PYTHON))
    assert result.report is not None and result.report.with_pytorch and result.report.passed
    assert {artifact.precision for artifact in result.manifest.artifacts} == {"fp32", "fp16"}
