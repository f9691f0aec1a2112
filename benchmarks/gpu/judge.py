"""Judges whether tokens are a model's greedy ones, but for rounding.

Each token is held against fp32 PyTorch's scores behind the tokens before it, so that one flip does not
condemn what follows it. How far below the best score a token may lie is measured too: by how much PyTorch's
own fp16 scores differ from fp32's.

Below fp16 that PyTorch has the weights of the entry's precision: the checkpoint's, rounded to the nearest
again, in the blocks of the entry's bundle. So the limit stays that of fp16, whatever int4 loses: against the
checkpoint's own scores that loss would excuse any token of a random model. A cache in int8 is rounded in
PyTorch's fp16 scores, and raises the limit by what that changes.

python -m benchmarks.gpu.judge answers a line of JSON, `judge_answers`' arguments, with one of JSON.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

FIRST = 16  # tokens of each row that are looked at
# An error of e in two scores swaps them at up to 2 e; another order of sums may err twice as much.
SLACK = 4
Rows = Sequence[Sequence[int]]
Bundle = tuple[str, str]  # its folder, and a precision of its graphs


def judge_answers(
    checkpoint: str,
    kind: str,
    prompts: Rows,
    answers: Mapping[str, Rows],
    device: str = "cuda",
    bundles: Mapping[str, Bundle] | None = None,
) -> dict[str, dict[str, Any]]:
    """Judge each entry's new tokens.

    Args:
        checkpoint: a folder in Hugging Face's layout.
        kind: "generate" or "translate".
        prompts: or sources.
        answers: the new tokens of each row, by entry; the first is PyTorch's own in fp16.
        device: of torch.
        bundles: of the entries in int8, int4 or with a cache in int8, those that they were made of.

    Returns:
        For each entry "worst", the largest distance to the best score; "limit"; "flips", tokens that were
        not the best; "alike".
    """
    bundles = bundles or {}
    alike = [{name: rows for name, rows in answers.items() if name not in bundles}]
    groups = alike + [{name: answers[name]} for name in bundles]
    judged: dict[str, dict[str, Any]] = {}
    for group in filter(None, groups):
        bundle = bundles.get(next(iter(group)))
        judged |= judge_group(checkpoint, kind, prompts, group, device, bundle)
    return {name: judged[name] for name in answers}


def judge_group(
    checkpoint: str, kind: str, prompts: Rows, answers: Mapping[str, Rows], device: str, bundle: Bundle | None
) -> dict[str, dict[str, Any]]:
    """Judge entries whose weights are rounded alike; the limit is of the first one's tokens."""
    import torch

    first = next(iter(answers))
    exact: list[Any] = []
    gaps: dict[str, list[Any]] = {}
    with open_judge(checkpoint, kind, torch.float32, device, bundle) as (model, banned):
        for name, rows in answers.items():
            for scores, tokens in score_tokens(model, kind, prompts, rows, banned):
                best = scores.max(-1).values
                gaps.setdefault(name, []).append(best - scores.gather(-1, tokens[:, None])[:, 0])
                if name == first:
                    exact.append(scores.cpu())
    del model
    with open_judge(checkpoint, kind, torch.float16, device, bundle) as (half, banned):
        errors = [
            (scores.cpu() - wanted).nan_to_num(0.0).abs().max().item()  # of banned tokens -inf - -inf
            for (scores, _), wanted in zip(
                score_tokens(half, kind, prompts, answers[first], banned), exact, strict=True
            )
        ]
    limit = SLACK * max(errors)
    return {name: verdict(torch.cat(found).tolist(), limit) for name, found in gaps.items()}


def verdict(gaps: Sequence[float], limit: float) -> dict[str, Any]:
    """Return how far tokens were below the best; a gap of NaN counts as unlike, with "worst" None."""
    worst = max(gaps, key=lambda gap: math.inf if math.isnan(gap) else gap)
    return {
        "worst": round(worst, 5) if math.isfinite(worst) else None,
        "limit": round(limit, 5),
        "flips": sum(gap > 0 for gap in gaps),
        "alike": all(gap <= limit for gap in gaps),
    }


@contextmanager
def open_judge(
    checkpoint: str, kind: str, dtype: Any, device: str, bundle: Bundle | None
) -> Iterator[tuple[Any, list[int]]]:
    """Yield the model, with the weights of a bundle's precision, and the tokens that it may not choose."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    loader = AutoModelForCausalLM if kind == "generate" else AutoModelForSeq2SeqLM
    if bundle is None:
        model: Any = loader.from_pretrained(Path(checkpoint), dtype=dtype)
        yield model.to(device).eval(), list_banned(model, kind)
        return
    from planforge.exporter.reference_model import replace_conv1d

    model = loader.from_pretrained(Path(checkpoint), dtype=torch.float32).eval()
    replace_conv1d(model)
    rounding = read_rounding(model.base_model, *bundle)
    with rounding.apply(model.base_model):
        if dtype == torch.float16:
            round_cache(model, rounding.cache_scales)
        yield model.to(device, dtype), list_banned(model, kind)


def read_rounding(model: Any, folder: str, precision: str) -> Any:
    """Return the rounding of a model's weights and cache in a precision, in the blocks of a bundle's graphs.

    The values are the model's own, rounded to the nearest, so that a damaged graph is not held to itself.
    """
    from planforge.exporter.calibration.repeat import read_calibration
    from planforge.runtime.bundle.artifact import IN_HALF
    from planforge.runtime.bundle.bundle import Bundle

    calibration = read_calibration(Bundle.open(folder), model)
    rounding = calibration.make_rounding(IN_HALF.get(precision, precision))
    assert rounding is not None  # as of fp32
    return replace(rounding, dtype=None)


def round_cache(model: Any, scales: Mapping[str, Any]) -> None:
    """Let a GPT-2 round all keys and values to int8, by scales (H * D,) under the names of the cache."""
    import torch

    def round_part(part: Any, name: str) -> Any:
        scale = torch.from_numpy(scales[name]).to(part.device)
        return (part.float() / scale).round().clamp(-128, 127) * scale

    def round_keys_and_values(layer: int, module: Any, given: Any, made: Any) -> Any:
        queries, *parts = made.chunk(3, dim=-1)  # (B, T, E) each
        names = (f"cache.{layer}.key", f"cache.{layer}.value")
        rounded = [round_part(part, name).to(made.dtype) for part, name in zip(parts, names, strict=True)]
        return torch.cat([queries, *rounded], dim=-1)

    if scales:
        for layer, block in enumerate(model.base_model.h):
            block.attn.c_attn.register_forward_hook(partial(round_keys_and_values, layer))


def list_banned(model: Any, kind: str) -> list[int]:
    """Return the tokens that a model may not choose."""
    if kind == "generate":
        return []
    config = model.generation_config
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    return [*ends, *(word[0] for word in config.bad_words_ids or () if len(word) == 1)]


def score_tokens(
    model: Any, kind: str, prompts: Rows, rows: Rows, banned: Sequence[int]
) -> Iterator[tuple[Any, Any]]:
    """Return for each row the scores (N, V) by which its first tokens (N,) were chosen."""
    import torch

    for prompt, row in zip(prompts, rows, strict=True):
        new = list(row[:FIRST])
        with torch.inference_mode():
            if kind == "generate":
                ids = torch.tensor([[*prompt, *new[:-1]]], device=model.device)
                logits = model(ids).logits[0, -len(new) :]
            else:
                start = model.config.decoder_start_token_id
                source = torch.tensor([list(prompt)], device=model.device)
                target = torch.tensor([[start, *new[:-1]]], device=model.device)
                logits = model(input_ids=source, decoder_input_ids=target).logits[0]
            scores = logits.float().clone()
            scores[:, list(banned)] = -torch.inf
        yield scores, torch.tensor(new, device=model.device)


if __name__ == "__main__":
    print(json.dumps(judge_answers(**json.loads(sys.stdin.readline()))))
