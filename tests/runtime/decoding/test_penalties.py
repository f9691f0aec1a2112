"""frequency_penalty and presence_penalty by the formula of OpenAI's documentation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from planforge.runtime import TextGenerator, load
from planforge.runtime.decoding.history import TokenHistory
from planforge.runtime.decoding.sampling import Sampling, process
from planforge.runtime.errors import InputError


@pytest.fixture(scope="module")
def gpt(demo_bundle: Path) -> Iterator[TextGenerator]:
    with load(demo_bundle, backend="ort-cpu", precision="fp32") as model:
        assert isinstance(model, TextGenerator)
        yield model


def penalize(logits: npt.NDArray[Any], answer: Sequence[int], frequency: float, presence: float) -> Any:
    """mu[j] -> mu[j] - c[j] * alpha_frequency - float(c[j] > 0) * alpha_presence"""
    counts = Counter(answer)
    changed = np.array(logits, np.float64)
    for token in range(len(changed)):
        c = counts[token]
        changed[token] = changed[token] - c * frequency - float(c > 0) * presence
    return changed


@pytest.mark.parametrize(("frequency", "presence"), [(0.5, 0), (0, 1.5), (2, -2), (-0.25, 0.75)])
def test_it_is_openais_formula_over_the_answer_alone(frequency: float, presence: float) -> None:
    random = np.random.default_rng(1)
    logits = random.normal(size=(2, 12)).astype(np.float32)
    histories = [TokenHistory([1, 1, 2]), TokenHistory([5])]
    answers = [[3, 3, 1, 3], [99, 7]]  # an id without a logit
    for history, answer in zip(histories, answers, strict=True):
        history.extend(answer)
    sampling = Sampling(frequency_penalty=frequency, presence_penalty=presence)
    expected = [
        penalize(row, answer, frequency, presence) for row, answer in zip(logits, answers, strict=True)
    ]
    np.testing.assert_allclose(process(logits, histories, sampling), expected, atol=1e-5)


@pytest.mark.parametrize(("frequency", "presence"), [(1.0, 0.0), (0.0, 2.0), (2.0, -1.0)])
def test_whole_answers(gpt: TextGenerator, frequency: float, presence: float) -> None:
    """The oracle as a processor of the caller's gives the same answer; the prompt does not count."""
    prompt = "the the the of of"
    length = gpt.count_tokens(prompt)

    def run_oracle(tokens: Sequence[int], logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        changed: npt.NDArray[np.float32] = penalize(logits, tokens[length:], frequency, presence).astype("f4")
        return changed

    usual = gpt.generate(prompt, max_new_tokens=40, ignore_eos=True)
    expected = gpt.generate(prompt, max_new_tokens=40, ignore_eos=True, logits_processor=run_oracle)
    options: dict[str, Any] = {"frequency_penalty": frequency, "presence_penalty": presence}
    answer = gpt.generate(prompt, max_new_tokens=40, ignore_eos=True, **options)
    assert answer.token_ids == expected.token_ids != usual.token_ids
    submitted = gpt.submit(prompt, max_new_tokens=40, ignore_eos=True, **options).result()
    assert submitted.token_ids == expected.token_ids
    guessed = gpt.generate(prompt, max_new_tokens=40, ignore_eos=True, speculative="prompt-lookup", **options)
    assert guessed.token_ids == expected.token_ids


@pytest.mark.parametrize("name", ["frequency_penalty", "presence_penalty"])
def test_what_is_refused(gpt: TextGenerator, name: str) -> None:
    for value in (2.1, -2.1, float("nan"), "1", True):
        refused: Any = value
        with pytest.raises(InputError, match=name):
            Sampling(**{name: refused})
    options: dict[str, Any] = {name: 1.0}
    with pytest.raises(InputError, match=name):
        gpt.generate("a", num_beams=2, **options)
