"""What BERT's published folders hold: names old and new, heads, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from planforge.models import Bert
from planforge.models.checkpoint import load_model

from ..helpers.bert import FAR, LIMIT, OUTPUTS, assert_outputs, batch, distance, each_architecture, expected
from ..helpers.models import edit_json, edit_weights, random_bert, tiny_bert

DECODER = "cls.predictions.decoder.weight"

Reference = transformers.PreTrainedModel


def loaded(folder: Path) -> Bert:
    model = load_model(folder)
    assert isinstance(model, Bert)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    return model


def assert_equal(folder: Path, reference: Reference) -> None:
    inputs = batch(reference, 2, 20)
    assert_outputs(loaded(folder), inputs, expected(reference, inputs))


def names_in(folder: Path) -> set[str]:
    return set(load_file(folder / "model.safetensors"))


def rename(folder: Path, *replacements: tuple[str, str]) -> None:
    """Rewrites model.safetensors with other names; each replacement hits some."""
    weights = load_file(folder / "model.safetensors")
    changes: dict[str, Tensor | None] = {}
    for name, tensor in weights.items():
        new = name
        for old, put in replacements:
            new = new.replace(old, put)
        if new != name:
            changes |= {name: None, new: tensor.clone()}
    for old, _ in replacements:
        assert any(old in name for name in weights), old
    edit_weights(folder, **changes)


def refusal(folder: Path) -> str:
    with pytest.raises(ValueError) as caught:
        load_model(folder)
    return str(caught.value)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "checkpoint"


@pytest.mark.parametrize(
    ("architecture", "prefix"),
    [("BertForPreTraining", "bert."), ("DistilBertForMaskedLM", "distilbert.")],
)
def test_names_with_and_without_the_prefix(folder: Path, architecture: str, prefix: str) -> None:
    reference = tiny_bert(folder, architecture)
    assert {name for name in names_in(folder) if name.startswith(prefix)}
    assert_equal(folder, reference)
    rename(folder, (prefix, ""))
    assert "embeddings.word_embeddings.weight" in names_in(folder)
    assert_equal(folder, reference)


@pytest.mark.parametrize(
    ("architecture", "prefix"), [("BertModel", "bert."), ("DistilBertModel", "distilbert.")]
)
def test_a_model_without_a_head_may_have_the_prefix(folder: Path, architecture: str, prefix: str) -> None:
    reference = tiny_bert(folder, architecture)
    assert "embeddings.word_embeddings.weight" in names_in(folder)
    edit_weights(
        folder,
        **{name: None for name in names_in(folder)},
        **{prefix + name: tensor for name, tensor in load_file(folder / "model.safetensors").items()},
    )
    assert_equal(folder, reference)


def test_layer_norms_by_their_old_names(folder: Path) -> None:
    reference = tiny_bert(folder, "BertForPreTraining")
    rename(folder, ("LayerNorm.weight", "LayerNorm.gamma"), ("LayerNorm.bias", "LayerNorm.beta"))
    assert "bert.encoder.layer.1.output.LayerNorm.gamma" in names_in(folder)
    assert "cls.predictions.transform.LayerNorm.beta" in names_in(folder)
    assert_equal(folder, reference)


@pytest.mark.parametrize(("architecture", "prefix"), [("BertForMaskedLM", "bert."), ("DistilBertModel", "")])
def test_buffers_of_ids_are_ignored(folder: Path, architecture: str, prefix: str) -> None:
    reference = tiny_bert(folder, architecture)
    edit_weights(
        folder,
        **{
            f"{prefix}embeddings.position_ids": torch.arange(64)[None],
            f"{prefix}embeddings.token_type_ids": torch.zeros(1, 64, dtype=torch.int64),
        },
    )
    assert_equal(folder, reference)


def test_the_masked_word_heads_weight_and_bias_may_be_there_twice(folder: Path) -> None:
    reference = tiny_bert(folder, "BertForMaskedLM")
    weights = reference.state_dict()
    alone = "cls.predictions.bias"
    bias = "cls.predictions.decoder.bias"
    weight = DECODER
    edit_weights(folder, **{name: weights[name].clone() for name in (alone, bias, weight)})
    assert_equal(folder, reference)
    edit_weights(folder, **{alone: None})  # either name will do
    assert_equal(folder, reference)
    edit_weights(folder, **{alone: weights[bias].clone(), bias: None})
    assert_equal(folder, reference)
    edit_weights(folder, **{bias: weights[bias] + 1})
    assert "holds heads.masked_lm.decoder.bias twice" in refusal(folder)


def test_an_untied_decoders_own_bias_is_the_one_that_counts(folder: Path) -> None:
    reference = tiny_bert(folder, "BertForMaskedLM", tie_word_embeddings=False)
    weights = load_file(folder / "model.safetensors")
    alone = "cls.predictions.bias"
    bias = "cls.predictions.decoder.bias"
    assert distance(weights[alone], weights[bias]) > LIMIT
    assert_equal(folder, reference)
    edit_weights(folder, **{alone: weights[bias].clone(), bias: None})  # older files have this alone
    assert_equal(folder, reference)


@pytest.mark.parametrize(
    ("architecture", "decoder"),
    [
        ("BertForMaskedLM", DECODER),
        ("DistilBertForMaskedLM", "vocab_projector.weight"),
    ],
)
def test_a_tied_head_is_the_words_and_an_untied_one_its_own(
    folder: Path, architecture: str, decoder: str
) -> None:
    reference = tiny_bert(folder, architecture)
    assert "heads.masked_lm.decoder.weight" not in dict(loaded(folder).named_parameters())  # lists it once
    edit_weights(folder, **{decoder: reference.state_dict()[decoder] + 1})
    message = refusal(folder)
    assert "heads.masked_lm.decoder.weight differs from embeddings.words.weight" in message
    assert "tie_word_embeddings" in message

    shutil.rmtree(folder)
    untied = tiny_bert(folder, architecture, tie_word_embeddings=False)
    assert decoder in names_in(folder)
    inputs = batch(untied, 2, 20)
    as_if_tied = random_bert(architecture)
    as_if_tied.load_state_dict(untied.state_dict())
    as_if_tied.tie_weights()
    assert distance(expected(untied, inputs)["masked_lm"], expected(as_if_tied, inputs)["masked_lm"]) > FAR
    assert_equal(folder, untied)
    edit_weights(folder, **{decoder: None})
    assert "missing: heads.masked_lm.decoder.weight (96, 32)" in refusal(folder)


def test_both_heads_of_a_folder_like_bert_base_uncased(folder: Path) -> None:
    """Its config.json names BertForMaskedLM; its weights are those of BertForPreTraining, by old names."""
    reference = tiny_bert(folder, "BertForPreTraining")
    rename(folder, ("LayerNorm.weight", "LayerNorm.gamma"), ("LayerNorm.bias", "LayerNorm.beta"))
    edit_json(folder / "config.json", architectures=["BertForMaskedLM"], tie_word_embeddings=...)
    names = names_in(folder)
    assert {"cls.predictions.bias", "cls.seq_relationship.weight", "bert.pooler.dense.weight"} <= names
    assert DECODER not in names
    model = loaded(folder)
    assert model.config.heads == ("masked_lm", "next_sentence") and model.config.pooler == "tanh"
    assert_equal(folder, reference)


@each_architecture
def test_the_weights_tell_heads_classes_and_pooler(folder: Path, architecture: str) -> None:
    classifies = architecture.endswith(("SequenceClassification", "TokenClassification"))
    reference = tiny_bert(folder, architecture, **({"num_labels": 5} if classifies else {}))
    config = loaded(folder).config
    assert set(config.heads) == set(OUTPUTS[architecture]) - {"pooler_output"}
    if classifies:
        assert config.num_labels == 5
    pools = [name for name, _ in reference.named_modules() if name.endswith(("pooler", "pre_classifier"))]
    assert config.pooler == (("relu" if "Distil" in architecture else "tanh") if pools else None)
    assert config.type_vocab_size == (0 if "Distil" in architecture else 2)
    # config.json has no such settings; that it may hold anything changes nothing
    edit_json(folder / "config.json", heads=["next_sentence"], pooler="relu", sentence={"pooling": ["mean"]})
    assert loaded(folder).config == config


@pytest.mark.parametrize("architecture", ["BertForMultipleChoice", "DistilBertForMultipleChoice"])
def test_a_classifier_without_a_meaning_is_refused(folder: Path, architecture: str) -> None:
    random_bert(architecture).save_pretrained(folder)
    edit_json(folder / "config.json", architectures=[])
    assert "architecture is missing and does not name its task" in refusal(folder)
    edit_json(folder / "config.json", architectures=...)
    assert "architecture is missing and does not name its task" in refusal(folder)


@pytest.mark.parametrize(
    ("architecture", "head", "stems"),
    [
        ("BertForQuestionAnswering", "question_answering", ["qa_outputs"]),
        ("DistilBertForQuestionAnswering", "question_answering", ["qa_outputs"]),
        ("BertForSequenceClassification", "sequence_classification", ["classifier"]),
        ("DistilBertForTokenClassification", "token_classification", ["classifier"]),
        ("BertForNextSentencePrediction", "next_sentence", ["cls.seq_relationship"]),
        ("BertForMaskedLM", "masked_lm", ["cls.predictions"]),
        ("DistilBertForMaskedLM", "masked_lm", ["vocab_"]),
    ],
)
def test_a_head_that_config_json_names_must_be_there(
    folder: Path, architecture: str, head: str, stems: list[str]
) -> None:
    tiny_bert(folder, architecture)
    names = [name for name in names_in(folder) if name.startswith(tuple(stems))]
    assert names
    edit_weights(folder, **dict.fromkeys(names))
    assert f"config.json names {architecture}, but the weights have no {head} head" in refusal(folder)


@pytest.mark.parametrize(
    ("architecture", "stem"),
    [
        ("BertForNextSentencePrediction", "bert.pooler."),
        ("BertForSequenceClassification", "bert.pooler."),
        ("DistilBertForSequenceClassification", "pre_classifier."),
    ],
)
def test_a_head_on_the_first_token_without_a_pooler_is_refused(
    folder: Path, architecture: str, stem: str
) -> None:
    tiny_bert(folder, architecture)
    names = [name for name in names_in(folder) if name.startswith(stem)]
    assert len(names) == 2
    edit_weights(folder, **dict.fromkeys(names))
    message = refusal(folder)
    assert str(folder) in message and "need a pooler, but the weights have none" in message


@pytest.mark.parametrize(
    ("architecture", "name", "value"),
    [
        ("BertModel", "position_embedding_type", "relative_key"),
        ("BertModel", "position_embedding_type", "relative_key_query"),
        ("BertModel", "is_decoder", True),
        ("BertModel", "add_cross_attention", True),
        ("BertModel", "hidden_act", "mish"),
        ("BertModel", "num_attention_heads", 5),
        ("BertModel", "num_hidden_layers", "2"),
        ("BertModel", "hidden_size", None),
        ("BertModel", "layer_norm_eps", -1.0),
        ("DistilBertModel", "activation", "mish"),
        ("DistilBertModel", "n_heads", 5),
        ("DistilBertModel", "dim", None),
    ],
)
def test_settings_that_are_not_supported_are_named(
    folder: Path, architecture: str, name: str, value: object
) -> None:
    tiny_bert(folder, architecture)
    edit_json(folder / "config.json", **{name: value})
    ours = {"activation": "hidden_act", "n_heads": "num_attention_heads", "dim": "hidden_size"}
    message = refusal(folder)
    assert f"{ours.get(name, name)}={value!r}" in message


def test_settings_at_their_usual_values_are_read(folder: Path) -> None:
    reference = tiny_bert(folder)
    usual = {"position_embedding_type": "absolute", "is_decoder": False, "add_cross_attention": False}
    edit_json(folder / "config.json", **usual)
    assert usual.items() <= json.loads((folder / "config.json").read_text()).items()
    assert_equal(folder, reference)
