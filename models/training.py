"""Trains the reference models: losses, learning rates and one loop, for models that end in an export.

It is no framework: one device, one precision, and the caller's batches. For more, docs/train.md says when to
use transformers' Trainer. `training_data` makes batches, `dropout` adds dropout.

B batch, T tokens, V vocabulary, C classes
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .causal_encoder import CausalEncoder, CausalEncoderConfig
from .causal_saving import ENDINGS, WITHOUT_BIAS
from .encoder import POOLED_HEADS, Encoder
from .gpt2 import GPT2
from .llama import Llama
from .saving import check_saved
from .training_data import IGNORED

Batch = TypeVar("Batch")
EncoderModel = TypeVar("EncoderModel", bound=Encoder)


def train(
    model: nn.Module,
    batches: Iterable[Batch],
    loss_of: Callable[[Batch], Tensor],
    rate: Callable[[int], float],
    optimizers: Sequence[torch.optim.Optimizer] | None = None,
    clip: float | None = 1.0,
) -> Iterator[tuple[int, float]]:
    """Train on each batch; yield the step's number, from 1, and its loss, so that the caller logs and stops.

    The model is in training mode until the batches or the caller's loop end, then in eval mode.

    Args:
        model: its parameters that require a gradient are trained; those of `load_model` do not until
            `model.requires_grad_(True)`.
        batches: as many as there are steps.
        loss_of: computes the loss of a batch, a scalar.
        rate: returns the learning rate of a step, see `schedule_rate` and `attention_rate`.
        optimizers: of the parameters to train; `[make_adamw(model)]` when None.
        clip: the largest norm of all gradients together; None means any.

    Raises:
        ValueError: no parameter requires a gradient.
        FloatingPointError: a loss is not finite; the weights are those of the step before.
    """
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(
            f"no parameter of this {type(model).__name__} requires a gradient: load_model freezes them;"
            " call model.requires_grad_(True)"
        )
    optimizers = [make_adamw(model)] if optimizers is None else optimizers
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    parameters = [parameter for group in groups for parameter in group["params"]]
    model.train()
    try:
        for step, batch in enumerate(batches, start=1):
            for group in groups:
                group["lr"] = rate(step)
            loss = loss_of(batch)
            if not torch.isfinite(loss):
                raise FloatingPointError(
                    f"the loss of step {step} is {loss.item()}; lower the learning rate, or look at the batch"
                )
            loss.backward()  # type: ignore[no-untyped-call]
            if clip is not None:
                nn.utils.clip_grad_norm_(parameters, clip)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            yield step, loss.item()
    finally:
        model.eval()


def token_loss(logits: Tensor, labels: Tensor, smoothing: float = 0.0) -> Tensor:
    """Return the mean cross-entropy of all labels of a batch that count; 0 where none does.

    It is the loss of teacher forcing, masked words, classes of texts and tags.

    Args:
        logits: (..., C)
        labels: (...) int64; `IGNORED` counts nowhere.
        smoothing: the share of the target distribution that is spread over all C ("Attention Is All You
            Need", 5.4, has 0.1).
    """
    total = F.cross_entropy(
        logits.flatten(0, -2),
        labels.flatten(),
        ignore_index=IGNORED,
        label_smoothing=smoothing,
        reduction="sum",
    )
    return total / (labels != IGNORED).sum().clamp(min=1)


def next_token_loss(logits: Tensor, ids: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return a language model's loss: the logits (B, T, V) at a token predict the one after it.

    Args:
        logits: (B, T, V)
        ids: (B, T) int64, the tokens that the model read.
        mask: (B, T), 0 at padding, which is not predicted; None when there is none.
    """
    labels = ids if mask is None else ids.masked_fill(mask == 0, IGNORED)
    return token_loss(logits[:, :-1], labels[:, 1:])


def pretraining_loss(outputs: Mapping[str, Tensor], words: Tensor, is_random: Tensor) -> Tensor:
    """Return BERT's loss: that of masked words plus that of the next sentence (Devlin et al., A.2).

    Args:
        outputs: those of a `Bert` with the heads masked_lm and next_sentence.
        words: (B, T), the labels of `mask_words`.
        is_random: (B,), 0 where the second sentence follows the first, 1 where it is a random one.
    """
    return token_loss(outputs["masked_lm"], words) + token_loss(outputs["next_sentence"], is_random)


def span_loss(logits: Tensor, first: Tensor, last: Tensor) -> Tensor:
    """Return the loss of question answering: the mean of those of an answer's first and last token.

    Args:
        logits: (B, T, 2)
        first, last: (B,), the answer's tokens; `IGNORED` where the text was cut before them.
    """
    return (token_loss(logits[..., 0], first) + token_loss(logits[..., 1], last)) / 2


def add_language_loss(task: Tensor, logits: Tensor, ids: Tensor, mask: Tensor, weight: float = 0.5) -> Tensor:
    """Return GPT-1's loss of fine-tuning: the task's, plus `weight` times that of language (3.2).

    Args:
        task: the loss of the task, a scalar.
        logits, ids, mask: as in `next_token_loss`.
        weight: the paper's lambda.
    """
    return task + weight * next_token_loss(logits, ids, mask)


def schedule_rate(done: float, warm_up: float, floor: float = 0.0, cosine: bool = False) -> float:
    """Return the share of the peak learning rate once `done` of a training, 0 to 1, is over.

    Args:
        done: by steps, or by the clock.
        warm_up: the part of the training in which the rate grows in proportion.
        floor: the share at the end, and the least at the start.
        cosine: it falls by half a cosine, else along a line, as for BERT.
    """
    if done < warm_up:
        return max(floor, done / warm_up)
    rest = min(1.0, (done - warm_up) / (1.0 - warm_up)) if warm_up < 1 else 1.0
    left = 0.5 * (1.0 + math.cos(math.pi * rest)) if cosine else 1.0 - rest
    return floor + (1.0 - floor) * left


def attention_rate(step: int, width: int, warm_up: int = 4000) -> float:
    """Return the learning rate of "Attention Is All You Need" (5.3) for a step, from 1.

    Args:
        step: number of the step.
        width: d_model.
        warm_up: steps in which the rate grows in proportion; then it falls with the root of the step.
    """
    return float(width**-0.5 * min(step**-0.5, step * warm_up**-1.5))


def make_adamw(
    model: nn.Module, decay: float = 0.01, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8
) -> torch.optim.AdamW:
    """Return AdamW for all trained parameters; matrices alone decay: no biases, norms and embeddings."""
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    decayed: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for parameter in model.parameters():  # each shared weight once, also that of a tied head
        if parameter.requires_grad:
            is_matrix = parameter.dim() >= 2 and id(parameter) not in embeddings
            (decayed if is_matrix else others).append(parameter)
    groups: list[dict[str, Any]] = [
        {"params": decayed, "weight_decay": decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, betas=betas, eps=eps)


def initialize(model: nn.Module, std: float = 0.02) -> None:
    """Give linear layers and embeddings the first weights of GPT-2 and BERT: normal ones, and biases of 0."""
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=std)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)


def add_head(model: GPT2 | Llama, head: str, labels: int = 2, pad_token: int | None = None) -> CausalEncoder:
    """Return a decoder that reads whole texts with the weights of another, and a new head to be fine-tuned.

    Args:
        model: a pretrained GPT-2, GPT-1 or model of the Llama family; it does not change.
        head: "sequence_classification" for texts, which reads the last token, "token_classification" for
            tags, or "question_answering".
        labels: classes of texts or tags.
        pad_token: the token that pads texts, which the head of texts never reads.

    Raises:
        ValueError: the model is another, or `save_model` cannot write it; or the head is another.
    """
    if not isinstance(model, GPT2 | Llama):
        raise ValueError(
            f"add_head takes a GPT2 or a Llama, not a {type(model).__name__}; replace_heads is for encoders"
        )
    if head not in ENDINGS:
        raise ValueError(f"head={head!r} is not one of {', '.join(ENDINGS)}")
    bias = head != WITHOUT_BIAS
    config = CausalEncoderConfig.from_decoder(
        model.config, heads=(head,), num_labels=labels, pad_token=pad_token, head_bias=bias
    )
    new = CausalEncoder(config)
    check_saved(new)  # now, and not once it is trained
    initialize(new.heads)
    weights = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith("lm_head.")}
    new.decoder.load_state_dict(weights)
    return new


def replace_heads(model: EncoderModel, head: str, labels: int = 2, pooler: str = "tanh") -> EncoderModel:
    """Return an encoder with the weights of another, and one new head to be fine-tuned.

    Args:
        model: a pretrained encoder; it does not change.
        head: one of `HEADS`, such as "sequence_classification" for texts and pairs.
        labels: classes of texts or tags.
        pooler: the activation of a new pooler, where the head reads one and the model has none: "tanh" for
            BERT and RoBERTa, "relu" for DistilBERT.
    """
    own = (model.config.pooler or pooler) if head in POOLED_HEADS else None
    config = replace(model.config, heads=(head,), num_labels=labels, pooler=own, sentence=None)
    new = type(model)(config)
    initialize(new)
    made = ("heads.",) if model.config.pooler or own is None else ("heads.", "pooler.")
    left = ("heads.", "sentence.") if own else ("heads.", "sentence.", "pooler.")
    weights = {name: tensor for name, tensor in new.state_dict().items() if name.startswith(made)}
    weights |= {name: tensor for name, tensor in model.named_parameters() if not name.startswith(left)}
    new.load_state_dict(weights)
    return new
