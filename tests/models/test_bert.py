from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from planforge.models import Bert, BertConfig
from planforge.models.checkpoint import load_model

from ..helpers.bert import (
    FAR,
    LIMIT,
    OUTPUTS,
    PER_TOKEN,
    assert_outputs,
    batch,
    distance,
    each_architecture,
    expected,
)
from ..helpers.models import TINY_BERT, random_bert

LENGTHS = (20, 7, 1)


def through_a_folder(reference: transformers.PreTrainedModel) -> Bert:
    with tempfile.TemporaryDirectory() as folder:
        reference.save_pretrained(folder)
        ours = load_model(Path(folder))
    assert isinstance(ours, Bert) and not ours.training
    return ours


def padded(inputs: dict[str, Tensor], lengths: tuple[int, ...] = LENGTHS) -> dict[str, Tensor]:
    """The same with a mask by which row b has `lengths[b]` tokens."""
    ids = inputs["input_ids"]
    mask = (torch.arange(ids.shape[1])[None] < torch.tensor(lengths)[:, None]).long()
    return {**inputs, "input_ids": ids * mask, "attention_mask": mask}


@each_architecture
@pytest.mark.parametrize("padding", [False, True], ids=["whole", "padded"])
def test_outputs_equal_transformers(architecture: str, padding: bool) -> None:
    reference = random_bert(architecture)
    inputs = batch(reference, 3, 20)
    if padding:
        inputs = padded(inputs)
    wanted = expected(reference, inputs)
    for name, output in wanted.items():
        rows = output.transpose(0, 1) if name == "hidden_states" else output
        assert min(distance(rows[0], rows[1]), distance(rows[0], rows[2])) > FAR, name
    assert_outputs(through_a_folder(reference), inputs, wanted)


@each_architecture
def test_every_parameter_counts(architecture: str) -> None:
    """Otherwise equal outputs would say little: the reference has no idle weight."""
    reference = random_bert(architecture)
    inputs = batch(reference, 3, 20)
    wanted = expected(reference, inputs)
    for name, parameter in reference.named_parameters():
        if name.endswith(("key.bias", "k_lin.bias")):
            continue  # adds the same to all scores of a query, which softmax takes away again
        kept = parameter.detach().clone()
        with torch.no_grad():
            parameter.mul_(1.5)
            moved = max(distance(out, wanted[n]) for n, out in expected(reference, inputs).items())
            parameter.copy_(kept)
        assert moved > 10 * LIMIT, name


@pytest.mark.parametrize("architecture", ["BertForPreTraining", "BertForSequenceClassification"])
def test_segments_are_read_and_are_0_without_token_type_ids(architecture: str) -> None:
    reference = random_bert(architecture)
    ours = through_a_folder(reference)
    inputs = batch(reference, 3, 20)
    ids = inputs["input_ids"]
    results = []
    for segments in (torch.zeros_like(ids), torch.ones_like(ids), inputs["token_type_ids"]):
        wanted = expected(reference, {"input_ids": ids, "token_type_ids": segments})
        assert_outputs(ours, {"input_ids": ids, "token_type_ids": segments}, wanted)
        results.append(wanted)
    assert min(distance(results[0][name], r[name]) for r in results[1:] for name in r) > FAR
    without = ours(ids)
    for name in set(without) - {"pooler_output"}:
        torch.testing.assert_close(without[name], results[0][name], rtol=0, atol=LIMIT)


@each_architecture
def test_padding_does_not_change_a_row(architecture: str) -> None:
    reference = random_bert(architecture)
    ours = through_a_folder(reference)
    inputs = padded(batch(reference, 3, 20))
    together = ours(**inputs)
    unmasked = ours(**{**inputs, "attention_mask": None})
    for b, length in enumerate(LENGTHS):
        row = {name: tensor[b : b + 1, :length] for name, tensor in inputs.items()}
        alone = expected(reference, row)
        for name, output in together.items():
            if name not in alone:
                continue
            got = output[b, :length] if name in PER_TOKEN else output[b]
            torch.testing.assert_close(got, alone[name][0], rtol=0, atol=LIMIT)
            if length < 20:  # so the mask is what does it
                seen = unmasked[name][b, :length] if name in PER_TOKEN else unmasked[name][b]
                assert distance(seen, got) > FAR


@pytest.mark.parametrize("architecture", ["BertForPreTraining", "DistilBertForMaskedLM"])
def test_what_padding_holds_makes_no_difference(architecture: str) -> None:
    reference = random_bert(architecture)
    ours = through_a_folder(reference)
    inputs = padded(batch(reference, 3, 20))
    mask = inputs["attention_mask"].bool()
    other = {**inputs, "input_ids": torch.where(mask, inputs["input_ids"], 77)}
    if "token_type_ids" in inputs:
        other["token_type_ids"] = torch.where(mask, inputs["token_type_ids"], 1)
    for name, output in ours(**inputs).items():
        again = ours(**other)[name]
        pair = (output[mask], again[mask]) if name in PER_TOKEN else (output, again)
        torch.testing.assert_close(*pair, rtol=0, atol=LIMIT)


def test_the_masked_word_head_gives_the_chosen_rows_alone() -> None:
    reference = random_bert("BertForPreTraining")
    ours = through_a_folder(reference)
    inputs = batch(reference, 3, 20)
    wanted = expected(reference, inputs)["masked_lm"].flatten(0, 1)
    x = ours(**inputs)["last_hidden_state"]
    rows = torch.tensor([41, 0, 19, 41])
    got = ours.head_outputs(x, torch.ones_like(inputs["input_ids"]), rows=rows)
    assert got["masked_lm"].shape == (4, 96)
    torch.testing.assert_close(got["masked_lm"], wanted[rows], rtol=0, atol=LIMIT)


@pytest.mark.parametrize(
    ("architecture", "config"),
    [
        *(
            ("BertForPreTraining", {"hidden_act": name})
            for name in ("relu", "silu", "gelu_new", "gelu_pytorch_tanh", "tanh")
        ),
        ("BertForPreTraining", {"num_attention_heads": 1}),
        ("BertForPreTraining", {"num_attention_heads": 32}),
        ("BertForPreTraining", {"num_hidden_layers": 1, "layer_norm_eps": 0.1}),
        ("BertForPreTraining", {"num_hidden_layers": 3, "intermediate_size": 7}),
        ("BertForPreTraining", {"type_vocab_size": 5}),
        ("BertForPreTraining", {"type_vocab_size": 1}),
        ("BertForSequenceClassification", {"num_labels": 7}),
        ("BertForSequenceClassification", {"num_labels": 1}),
        ("BertForTokenClassification", {"num_labels": 7}),
        ("DistilBertForMaskedLM", {"activation": "relu"}),
        ("DistilBertForMaskedLM", {"activation": "gelu_new"}),
        ("DistilBertForMaskedLM", {"n_heads": 1, "n_layers": 1, "hidden_dim": 7}),
        ("DistilBertForMaskedLM", {"sinusoidal_pos_embds": True}),
        ("DistilBertForSequenceClassification", {"num_labels": 7}),
        ("DistilBertForTokenClassification", {"num_labels": 7, "n_heads": 8}),
    ],
    ids=str,
)
def test_outputs_equal_transformers_for_other_configs(architecture: str, config: dict[str, Any]) -> None:
    reference = random_bert(architecture, **config)
    inputs = padded(batch(reference, 3, 20))
    wanted = expected(reference, inputs)
    if "num_labels" in config:
        assert wanted[next(iter(OUTPUTS[architecture]))].shape[-1] == config["num_labels"]
    elif "type_vocab_size" in config:
        assert int(inputs["token_type_ids"].max()) + 1 == config["type_vocab_size"]
    else:  # the setting is one that shows
        usual = expected(random_bert(architecture), inputs)["last_hidden_state"]
        assert distance(usual, wanted["last_hidden_state"]) > 3 * LIMIT
    assert_outputs(through_a_folder(reference), inputs, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["BertForPreTraining", "DistilBertForMaskedLM"])
def test_outputs_equal_transformers_at_base_size(architecture: str) -> None:
    kind = transformers.DistilBertConfig if "Distil" in architecture else transformers.BertConfig
    published = {**kind().to_dict(), "initializer_range": 0.05}
    reference = random_bert(architecture, noise=0.01, **published)
    assert reference.num_parameters() > 60e6
    inputs = padded(batch(reference, 2, 12), (12, 5))
    wanted = expected(reference, inputs)
    assert wanted["masked_lm"].std() > 0.5
    assert distance(wanted["masked_lm"][0], wanted["masked_lm"][1]) > FAR
    with torch.inference_mode():
        assert_outputs(through_a_folder(reference), inputs, wanted)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, value) for name in TINY_BERT if name != "initializer_range" for value in (0, -1, 1.5, "8")),
        *(("type_vocab_size", value) for value in (-1, 1.5, None, True)),
        *(("num_labels", value) for value in (0, "2", None)),
        ("num_attention_heads", 5),  # does not divide hidden_size
        ("hidden_act", "mish"),
        ("hidden_act", ["gelu"]),
        *(("layer_norm_eps", value) for value in (-1e-5, math.nan, math.inf, "1e-5", None, True)),
        *(("tie_word_embeddings", value) for value in ("false", 0, None)),
    ],
)
def test_a_config_that_makes_no_sense_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{name}=.*"):
        BertConfig(**{"hidden_size": 32, "num_attention_heads": 4, name: value})  # type: ignore[arg-type]


def test_an_unknown_head_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"\['multiple_choice'\] are not among \['masked_lm', .*"):
        BertConfig(heads=("masked_lm", "multiple_choice"))


@pytest.mark.parametrize("head", ["next_sentence", "sequence_classification"])
def test_a_head_on_the_first_token_needs_a_pooler(head: str) -> None:
    with pytest.raises(ValueError, match=f"{head}.* need a pooler"):
        BertConfig(heads=(head,))
    assert BertConfig(heads=(head,), pooler="tanh").heads == (head,)
