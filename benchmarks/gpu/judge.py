"""Judges whether tokens are a model's greedy ones, but for the rounding of fp16.

Each token is held against fp32 PyTorch's scores behind the tokens before it, so that one flip does not
condemn what follows it. How far below the best score a token may lie is measured too: by how much PyTorch's
own fp16 scores differ from fp32's.

python -m benchmarks.gpu.judge answers a line of JSON, `examined`'s arguments, with one of JSON.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

FIRST = 16  # tokens of each row that are looked at
# An error of e in two scores swaps them at up to 2 e; another order of sums may err twice as much.
SLACK = 4
Rows = Sequence[Sequence[int]]


def judge_answers(
    checkpoint: str, kind: str, prompts: Rows, answers: Mapping[str, Rows], device: str = "cuda"
) -> dict[str, dict[str, Any]]:
    """Judge each entry's new tokens.

    Args:
        checkpoint: a folder in Hugging Face's layout.
        kind: "generate" or "translate".
        prompts: or sources.
        answers: the new tokens of each row, by entry; the first is PyTorch's own in fp16.
        device: of torch.

    Returns:
        For each entry "worst", the largest distance to the best score; "limit"; "flips", tokens that were
        not the best; "alike".
    """
    import torch

    first = next(iter(answers))
    exact: list[Any] = []
    gaps: dict[str, list[Any]] = {}
    model, banned = load_judge(checkpoint, kind, torch.float32, device)
    for name, rows in answers.items():
        for scores, tokens in score_tokens(model, kind, prompts, rows, banned):
            gaps.setdefault(name, []).append(scores.max(-1).values - scores.gather(-1, tokens[:, None])[:, 0])
            if name == first:
                exact.append(scores.cpu())
    del model
    half, _ = load_judge(checkpoint, kind, torch.float16, device)
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


def load_judge(checkpoint: str, kind: str, dtype: Any, device: str) -> tuple[Any, list[int]]:
    """Return the model, and the tokens that it may not choose."""
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    loader = AutoModelForCausalLM if kind == "generate" else AutoModelForSeq2SeqLM
    model: Any = loader.from_pretrained(Path(checkpoint), dtype=dtype)
    model = model.to(device).eval()
    if kind == "generate":
        return model, []
    config = model.generation_config
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    return model, [*ends, *(word[0] for word in config.bad_words_ids or () if len(word) == 1)]


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
