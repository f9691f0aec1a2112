"""Losses, gradients and dropout are transformers', from the same weights; rates and decay are the papers'."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.models.marian.modeling_marian import shift_tokens_right
from transformers.trainer_pt_utils import LabelSmoother

from planforge.models import (
    GPT2,
    Bert,
    BertConfig,
    GPT2Config,
    Llama,
    LlamaConfig,
    Transformer,
    load_model,
)
from planforge.models.attention import DynamicCache
from planforge.models.dropout import add_dropout
from planforge.models.training import (
    add_head,
    add_language_loss,
    attention_rate,
    initialize,
    make_adamw,
    next_token_loss,
    pretraining_loss,
    replace_heads,
    schedule_rate,
    span_loss,
    token_loss,
    train,
)
from planforge.models.training_data import IGNORED, mask_words, shift_right

from ..helpers.models import TINY, random_bert, random_gpt2, random_marian

LIMIT = 1e-5
RATE = 0.3  # of dropout, so that one place less would show
V = 96
IDS = torch.randint(5, V, (3, 12), generator=torch.Generator().manual_seed(3))
MASK = torch.ones_like(IDS)
MASK[1, 8:] = 0
SEGMENTS = torch.zeros_like(IDS)
SEGMENTS[:, 6:] = 1

Losses = tuple[Tensor, Tensor]  # theirs, ours
Make = Callable[[Any, Any], Losses]


def gpt2_losses(theirs: Any, ours: GPT2) -> Losses:
    labels = IDS.masked_fill(MASK == 0, IGNORED)
    positions = torch.arange(12)[None]
    loss = theirs(IDS, attention_mask=MASK, position_ids=positions, labels=labels).loss
    torch.manual_seed(5)
    return loss, next_token_loss(ours(IDS, attention_mask=MASK)[0], IDS, MASK)


def bert_losses(theirs: Any, ours: Bert) -> Losses:
    inputs, words = mask_words(IDS, MASK == 0, 4, V, torch.Generator().manual_seed(1))
    is_random = torch.tensor([0, 1, 1])
    loss = theirs(
        inputs,
        attention_mask=MASK,
        token_type_ids=SEGMENTS,
        labels=words,
        next_sentence_label=is_random,
    ).loss
    torch.manual_seed(5)
    return loss, pretraining_loss(ours(inputs, MASK, SEGMENTS), words, is_random)


def marian_losses(theirs: Any, ours: Transformer) -> Losses:
    pad = theirs.config.pad_token_id
    source = IDS % (pad - 1) + 1
    labels = source[:, :7].flip(1).masked_fill(MASK[:, 2:9] == 0, IGNORED)
    loss = theirs(source, attention_mask=MASK, labels=labels).loss
    torch.manual_seed(5)
    return loss, token_loss(ours(source, shift_right(labels, pad, pad), MASK), labels)


def make_gpt2(rate: float) -> Any:
    drops: dict[str, Any] = dict.fromkeys(("embd_pdrop", "resid_pdrop", "attn_pdrop"), rate)
    return random_gpt2(**TINY, **drops, attn_implementation="eager")


def make_bert(rate: float) -> Any:
    drops: dict[str, Any] = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), rate)
    return random_bert("BertForPreTraining", **drops, attn_implementation="eager")


def make_marian(rate: float) -> Any:
    drops: dict[str, Any] = dict.fromkeys(("dropout", "attention_dropout"), rate)
    return random_marian(**drops, activation_dropout=0.0, attn_implementation="eager")


def llama_losses(theirs: Any, ours: Llama) -> Losses:
    loss = theirs(IDS, labels=IDS).loss
    torch.manual_seed(5)
    return loss, next_token_loss(ours(IDS)[0], IDS)


LLAMA: dict[str, Any] = {
    **{"vocab_size": V, "hidden_size": 32, "intermediate_size": 48},
    **{"num_attention_heads": 4, "num_key_value_heads": 2},
}


def make_llama(rate: float) -> Any:
    """Its attention drops, and nothing else; two heads of queries share one of keys."""
    transformers.set_seed(0)
    settings: dict[str, Any] = {"initializer_range": 0.3, "attn_implementation": "eager"}
    config = transformers.LlamaConfig(**LLAMA, **settings, num_hidden_layers=2, attention_dropout=rate)
    return transformers.LlamaForCausalLM(config)


CASES: dict[str, tuple[Callable[[float], Any], Make]] = {
    "gpt2": (make_gpt2, gpt2_losses),
    "bert": (make_bert, bert_losses),
    "marian": (make_marian, marian_losses),
    "llama": (make_llama, llama_losses),
}


def load_trained(reference: Any, folder: Path) -> Any:
    """Ours with the reference's weights, ready to be trained."""
    reference.save_pretrained(folder)
    return load_model(folder).requires_grad_(True)


def read_gradients(reference: Any, folder: Path) -> dict[str, Tensor]:
    """The gradients of transformers' model under our names: our own loader translates them as weights."""
    with torch.no_grad():
        for parameter in reference.parameters():
            if parameter.grad is not None:
                parameter.copy_(parameter.grad)
    reference.save_pretrained(folder)
    return dict(load_model(folder).named_parameters())


def assert_equal_gradients(reference: Any, ours: nn.Module, folder: Path, pad: int | None) -> None:
    """Compare each parameter's gradient by its own largest value; in float64, where rounding is far less."""
    wanted = read_gradients(reference, folder)
    largest = max(float(tensor.abs().max()) for tensor in wanted.values())
    rounding = 2.0**-23 * LIMIT * largest  # the true gradient of keys' biases is 0: softmax cancels them
    for name, parameter in ours.named_parameters():
        if name == "output.bias":  # transformers has no gradient for Marian's
            continue
        assert parameter.grad is not None, name
        got = parameter.grad
        if pad is not None and ".words." in name:
            # nn.Embedding(padding_idx) of transformers gives the padding, which its decoder starts from, no
            # gradient as an input; ours is trained.
            got = got.index_fill(0, torch.tensor(pad), 0.0)
            wanted[name] = wanted[name].index_fill(0, torch.tensor(pad), 0.0)
        limit = LIMIT * float(wanted[name].abs().max()) + rounding
        message = partial("{}: {}".format, name)
        torch.testing.assert_close(got, wanted[name], rtol=0, atol=limit, check_dtype=False, msg=message)


@pytest.mark.parametrize("rate", [0.0, RATE])
@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_are_those_of_transformers(tmp_path: Path, name: str, rate: float) -> None:
    """With dropout too: the same seed drops the same values where places and their order are equal."""
    make, losses = CASES[name]
    reference = make(rate).train()
    ours = load_trained(reference, tmp_path / "weights").train().double()
    reference.double()
    add_dropout(ours, 0.0 if name == "llama" else rate, attention=rate)
    torch.manual_seed(5)
    theirs, own = losses(reference, ours)
    torch.testing.assert_close(own, theirs, rtol=0, atol=LIMIT, check_dtype=False)  # some of theirs is fp32
    theirs.backward()  # type: ignore[no-untyped-call]
    own.backward()  # type: ignore[no-untyped-call]
    pad = reference.config.pad_token_id if name == "marian" else None
    assert_equal_gradients(reference, ours, tmp_path / "gradients", pad)


def test_steps_are_those_of_adamw_on_transformers(tmp_path: Path) -> None:
    """The whole loop: dropout, clipping, warm-up and decay of matrices alone."""
    reference = make_gpt2(RATE).train()
    ours = load_trained(reference, tmp_path / "before")
    add_dropout(ours, RATE)
    is_matrix = {
        n: "wte" not in n and "wpe" not in n and p.dim() > 1 for n, p in reference.named_parameters()
    }
    groups = [
        {
            "params": [p for n, p in reference.named_parameters() if is_matrix[n] is decays],
            "weight_decay": 0.1 if decays else 0.0,
        }
        for decays in (True, False)
    ]
    eps = 1e-4  # the gradients of the keys' biases are rounding alone, which a small one would blow up
    optimizer = torch.optim.AdamW(groups, lr=1e-3, eps=eps)
    schedule = transformers.get_linear_schedule_with_warmup(optimizer, 2, 4)
    torch.manual_seed(5)
    wanted = []
    for _ in range(4):
        loss = reference(IDS, labels=IDS).loss
        loss.backward()
        nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        wanted.append(loss.item())
    torch.manual_seed(5)
    steps = train(
        ours,
        [IDS] * 4,
        lambda ids: next_token_loss(ours(ids)[0], ids),
        lambda step: 1e-3 * schedule_rate((step - 1) / 4, warm_up=0.5),
        [make_adamw(ours, decay=0.1, eps=eps)],
        clip=0.5,
    )
    assert [loss for _, loss in steps] == pytest.approx(wanted, abs=LIMIT)
    assert not ours.training
    reference.save_pretrained(tmp_path / "after")
    for name, tensor in load_model(tmp_path / "after").named_parameters():
        torch.testing.assert_close(ours.get_parameter(name), tensor, rtol=0, atol=LIMIT)


@pytest.mark.parametrize("rate", [0.0, RATE])
@pytest.mark.parametrize(
    ("architecture", "head", "labels"),
    [
        ("BertForSequenceClassification", "sequence_classification", torch.tensor([2, 0, 1])),
        ("BertForTokenClassification", "token_classification", (IDS % 3).masked_fill(MASK == 0, IGNORED)),
    ],
)
def test_losses_of_texts_and_tags(
    tmp_path: Path, architecture: str, head: str, labels: Tensor, rate: float
) -> None:
    """A classifier drops what it reads, too."""
    drops: dict[str, Any] = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), rate)
    reference: Any = random_bert(architecture, num_labels=3, attn_implementation="eager", **drops).train()
    ours = load_trained(reference, tmp_path).train()
    add_dropout(ours, rate)
    inputs = {"attention_mask": MASK, "token_type_ids": SEGMENTS}
    torch.manual_seed(5)
    wanted = reference(IDS, **inputs, labels=labels).loss
    torch.manual_seed(5)
    torch.testing.assert_close(token_loss(ours(IDS, **inputs)[head], labels), wanted, rtol=0, atol=LIMIT)


def test_the_loss_of_answers_leaves_out_what_was_cut(tmp_path: Path) -> None:
    """transformers clamps a place outside the text to T, and ignores it."""
    reference: Any = random_bert("BertForQuestionAnswering")
    ours = load_trained(reference, tmp_path)
    first = torch.tensor([2, 40, 5])
    last = torch.tensor([4, 41, 5])
    wanted = reference(IDS, start_positions=first, end_positions=last).loss
    cut = [place.masked_fill(place >= 12, IGNORED) for place in (first, last)]
    torch.testing.assert_close(span_loss(ours(IDS)["question_answering"], *cut), wanted, rtol=0, atol=LIMIT)


def test_fine_tuning_adds_half_the_language_loss(tmp_path: Path) -> None:
    """GPT-1's loss beside that of transformers' double heads, whose two losses the paper adds."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        double = transformers.GPT2DoubleHeadsModel(transformers.GPT2Config(**TINY)).eval()
    body = random_gpt2(**TINY)
    body.load_state_dict(double.state_dict(), strict=False)
    ours = load_trained(body, tmp_path)
    choices = torch.stack([IDS[:2], IDS[1:]], dim=1)  # (B, choices, T)
    last = torch.tensor([[11, 9], [10, 11]])
    right = torch.tensor([1, 0])
    out = double(choices, mc_token_ids=last, labels=choices, mc_labels=right)
    wanted = out.mc_loss + 0.5 * out.loss
    flat = choices.flatten(0, 1)
    states = ours.hidden_states(flat, DynamicCache(ours.empty_past(4), torch.ones_like(flat)))
    summary = double.multiple_choice_head.summary
    picked = states[torch.arange(4), last.flatten()]
    task = token_loss(nn.functional.linear(picked, summary.weight, summary.bias).view(2, 2), right)
    got = add_language_loss(task, ours.logits(states), flat, torch.ones_like(flat))
    torch.testing.assert_close(got, wanted, rtol=0, atol=LIMIT)
    got.backward()  # type: ignore[no-untyped-call]
    wanted.backward()
    torch.testing.assert_close(ours.wte.weight.grad, double.transformer.wte.weight.grad, rtol=0, atol=LIMIT)


def test_smoothing_is_transformers_label_smoother() -> None:
    logits = torch.randn(3, 12, V, generator=torch.Generator().manual_seed(0))
    labels = IDS.masked_fill(MASK == 0, IGNORED)
    wanted = LabelSmoother(epsilon=0.1)({"logits": logits}, labels)
    torch.testing.assert_close(token_loss(logits, labels, smoothing=0.1), wanted, rtol=0, atol=LIMIT)


def test_a_batch_without_labels_has_no_loss_and_no_gradient() -> None:
    logits = torch.randn(2, 3, V, requires_grad=True)
    loss = token_loss(logits, torch.full((2, 3), IGNORED))
    loss.backward()  # type: ignore[no-untyped-call]
    assert loss.item() == 0 and logits.grad is not None and not logits.grad.any()


def test_teacher_forcing_shifts_as_marian_does() -> None:
    labels = IDS.masked_fill(MASK == 0, IGNORED)
    assert torch.equal(shift_right(labels, start=1, pad=0), shift_tokens_right(labels, 0, 1))


@pytest.mark.parametrize("cosine", [False, True])
def test_rates_fall_as_those_of_transformers(cosine: bool) -> None:
    make = (
        transformers.get_cosine_schedule_with_warmup
        if cosine
        else transformers.get_linear_schedule_with_warmup
    )
    wanted = make(torch.optim.SGD([nn.Parameter(torch.zeros(1))]), 5, 50).lr_lambdas[0]
    for step in range(51):
        assert schedule_rate(step / 50, 0.1, cosine=cosine) == pytest.approx(wanted(step), abs=1e-12)
    assert schedule_rate(1.0, 0.1, floor=0.01, cosine=cosine) == pytest.approx(0.01)
    assert schedule_rate(0.0, 0.1, floor=0.01, cosine=cosine) == 0.01


def test_the_papers_rate_peaks_after_its_warm_up() -> None:
    """Section 5.3: d^-0.5 min(step^-0.5, step warmup^-1.5); for d = 512 and 4000 steps at most 7e-4."""
    rates = [attention_rate(step, 512) for step in range(1, 16001)]
    assert max(rates) == rates[3999] == pytest.approx(1 / (512 * 4000) ** 0.5)
    assert rates[1999] == pytest.approx(rates[3999] / 2)
    assert rates[15999] == pytest.approx(rates[3999] / 2)


def test_matrices_alone_decay() -> None:
    options: dict[str, Any] = {"head_dim": 8, "qkv_bias": True, "tie_word_embeddings": True}
    model = Llama(LlamaConfig(**LLAMA, **options, num_hidden_layers=1))
    model.norm.requires_grad_(False)
    decayed, others = make_adamw(model, decay=0.1).param_groups
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    projections = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    assert {names[id(p)] for p in decayed["params"]} == {f"layers.0.{name}.weight" for name in projections}
    assert sorted(names[id(p)] for p in others["params"]) == [
        "embed_tokens.weight",
        "layers.0.attention_norm.weight",
        "layers.0.mlp_norm.weight",
        "layers.0.self_attn.qkv_proj.bias",
    ]


def test_a_new_head_stands_on_the_old_weights(tmp_path: Path) -> None:
    ours = load_trained(make_bert(0.0), tmp_path)
    tuned = replace_heads(ours, "sequence_classification", labels=3)
    assert (tuned.config.heads, tuned.config.num_labels, tuned.config.pooler) == (
        ("sequence_classification",),
        3,
        "tanh",
    )
    assert all(p.requires_grad for p in tuned.parameters())
    kept = {n: p for n, p in ours.named_parameters() if not n.startswith("heads.")}
    assert all(torch.equal(tuned.get_parameter(name), p) for name, p in kept.items())
    head = dict(tuned.heads.named_parameters())
    assert (
        head["sequence_classification.weight"].shape == (3, 32)
        and not head["sequence_classification.bias"].any()
    )
    tagger = replace_heads(ours, "token_classification", labels=5)
    assert tagger.config.pooler is None and not hasattr(tagger, "pooler")


def test_a_head_that_could_not_be_saved_is_refused_before_the_training() -> None:
    sizes: dict[str, Any] = {"vocab_size": V, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4}
    refused: list[tuple[Any, str, str]] = [
        (
            GPT2(GPT2Config(**sizes, qkv_bias=False)),
            "sequence_classification",
            "as gpt2: qkv_bias would be .* with transformers' Trainer, and export the folder that it writes",
        ),
        (
            GPT2(GPT2Config(**sizes, norm_first=False)),
            "token_classification",
            "as openai-gpt: transformers has no OpenAIGPTForTokenClassification, but OpenAIGPTForSequence",
        ),
        (
            GPT2(GPT2Config(**sizes)),
            "masked_lm",
            "head='masked_lm' is not one of sequence_classification, token_cl",
        ),
        (
            Bert(BertConfig(vocab_size=V, hidden_size=32, num_hidden_layers=1, num_attention_heads=4)),
            "sequence_classification",
            "add_head takes a GPT2 or a Llama, not a Bert; replace_heads is for encoders",
        ),
    ]
    for model, head, said in refused:
        with pytest.raises(ValueError, match=said):
            add_head(model, head)


def test_weights_that_a_new_head_stands_on_are_all_there() -> None:
    """A name that no longer fits would leave a random weight."""
    model = GPT2(GPT2Config(vocab_size=V, n_positions=64, n_embd=32, n_layer=1, n_head=4))
    bert = Bert(BertConfig(vocab_size=V, hidden_size=32, num_hidden_layers=1, num_attention_heads=4))
    del model.ln_f
    del bert.embeddings.norm
    with pytest.raises(RuntimeError, match="Missing key"):
        add_head(model, "sequence_classification")
    with pytest.raises(RuntimeError, match="Missing key"):
        replace_heads(bert, "sequence_classification")


def test_first_weights_are_small_and_normal() -> None:
    model = GPT2(GPT2Config(vocab_size=V, n_positions=64, n_embd=32, n_layer=2, n_head=4))
    initialize(model)
    # The deviation of 3072 values is known to one part in 78: 10 % are eight of those.
    assert model.wte.weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert not model.h[0].attn.c_attn.bias.any() and bool((model.ln_f.weight == 1).all())  # type: ignore[operator, union-attr]


def test_frozen_weights_are_not_trained_in_vain(tmp_path: Path) -> None:
    make_gpt2(0.0).save_pretrained(tmp_path)
    frozen = load_model(tmp_path)
    steps = train(frozen, [IDS], lambda ids: next_token_loss(frozen(ids)[0], ids), lambda step: 1e-3)
    with pytest.raises(ValueError, match=r"no parameter of this GPT2 .*model\.requires_grad_\(True\)"):
        next(steps)


def test_a_loss_that_is_not_finite_changes_no_weight() -> None:
    model = nn.Linear(2, 2)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    scales: Iterator[float] = iter([float("nan")])
    steps = train(model, [torch.ones(2)], lambda x: model(x).sum() * next(scales), lambda step: 1e-3)
    with pytest.raises(FloatingPointError, match="the loss of step 1 is nan"):
        next(steps)
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    assert not model.training


def test_the_caller_stops_when_it_likes() -> None:
    model = nn.Linear(2, 1)
    nn.init.ones_(model.weight)
    nn.init.zeros_(model.bias)
    batches = iter(lambda: torch.ones(2), None)  # without end
    losses = []
    for step, loss in train(model, batches, lambda x: model(x).square().sum(), lambda step: 0.01):
        assert model.training
        losses.append(loss)
        if step == 20:
            break
    # A step of Adam moves each of three parameters by its rate at most, and the first by that much.
    assert losses[0] == 4 and losses[1] == pytest.approx((2 - 3 * 0.01) ** 2, abs=1e-3)
    assert len(losses) == 20 and losses == sorted(losses, reverse=True)
