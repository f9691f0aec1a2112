"""Recurrent models in the runtime's own loop: PyTorch's tokens, scores and alignments."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from planforge.exporter import export
from planforge.models import Recurrent
from planforge.models.g2p import END, PHONEMES, import_g2p
from planforge.runtime import Translator
from planforge.runtime.errors import ContextLengthError, InputError

from ...helpers.g2p import pronounce, write_checkpoint
from ...helpers.recurrent import KINDS, WORDS, encode_word, make_recurrent

LONGEST = 15  # new tokens
BEAMS = 4


@pytest.fixture(scope="module", params=KINDS)
def pair(
    request: pytest.FixtureRequest, recurrent_kind: Callable[[str], Path]
) -> Iterator[tuple[Translator, Recurrent]]:
    """A verified bundle of each kind, and its model in PyTorch."""
    with Translator.load(recurrent_kind(request.param)) as model:
        yield model, make_recurrent(request.param)


@torch.no_grad()
def find_logprobs(model: Recurrent, word: str, target: list[int]) -> Tensor:
    """Return the log-probabilities (V,) behind a target, all of which is read anew."""
    logits: Tensor = model(torch.tensor([encode_word(word)]), torch.tensor([[0, *target]]))[0, -1]
    logprobs = logits.log_softmax(-1)
    logprobs[0] = -torch.inf  # bad_words_ids, which take nothing from others' probabilities
    return logprobs


def write_greedily(model: Recurrent, word: str) -> tuple[int, ...]:
    target: list[int] = []
    while len(target) < LONGEST and 1 not in target:
        target.append(int(find_logprobs(model, word, target).argmax()))
    return tuple(target)


def search(model: Recurrent, word: str) -> list[tuple[float, tuple[int, ...]]]:
    """Return the targets of a beam search, best first, each with its mean log-probability."""
    beams: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    ended: list[tuple[float, tuple[int, ...]]] = []
    for step in range(1, LONGEST + 1):
        grown = [
            (score + float(logprob), (*target, token))
            for score, target in beams
            for token, logprob in enumerate(find_logprobs(model, word, list(target)))
        ]
        grown.sort(reverse=True)
        ended += [(s / step, t) for s, t in grown[:BEAMS] if t[-1] == 1]
        beams = [(s, t) for s, t in grown if t[-1] != 1][:BEAMS]
        best = sorted(ended, reverse=True)[:BEAMS]
        if len(best) == BEAMS and best[-1][0] >= beams[0][0] / step:
            return best
    return sorted([*ended, *((s / LONGEST, t) for s, t in beams)], reverse=True)[:BEAMS]


def test_greedy_tokens_and_scores_are_pytorchs(pair: tuple[Translator, Recurrent]) -> None:
    runtime, model = pair
    wanted = [write_greedily(model, word) for word in WORDS]
    together = runtime.translate(WORDS, num_beams=1)
    assert [result.token_ids for result in together] == wanted
    assert len({len(target) for target in wanted}) > 1
    for word, result in zip(WORDS, together, strict=True):
        alone = runtime.translate(word, num_beams=1)
        assert alone.token_ids == result.token_ids
        target = list(result.token_ids)
        scores = [find_logprobs(model, word, target[:i])[token] for i, token in enumerate(target)]
        assert result.score == pytest.approx(float(torch.stack(scores).mean()), abs=1e-5)
    assert "".join(chunk.text for chunk in runtime.stream(WORDS[3])) == together[3].text


def test_beams_are_pytorchs(pair: tuple[Translator, Recurrent]) -> None:
    runtime, model = pair
    results = runtime.translate(WORDS[:5], num_beams=BEAMS, n_best=BEAMS)
    for word, result in zip(WORDS, results, strict=False):
        wanted = search(model, word)
        assert [one.token_ids for one in result.candidates] == [target for _, target in wanted]
        np.testing.assert_allclose(
            [one.score for one in result.candidates], [s for s, _ in wanted], atol=1e-5
        )
    assert any(
        result.token_ids != runtime.translate(w, num_beams=1).token_ids
        for w, result in zip(WORDS, results, strict=False)
    )


def test_alignments_are_pytorchs(recurrent_bundle: Path) -> None:
    model = make_recurrent()
    with Translator.load(recurrent_bundle, precision="fp32") as runtime:
        for result, word in zip(runtime.translate(WORDS[:4], alignment=True), WORDS, strict=False):
            assert result.alignment is not None
            ids = encode_word(word)
            source, states = model.encode(torch.tensor([ids]), torch.tensor([len(ids)]))
            weights = []
            for token in (0, *result.token_ids[:-1]):
                _, states = model.step(torch.tensor([[token]]), states, source)
                assert source.weights is not None
                weights.append(source.weights[0])
            want = torch.cat(weights)[None, None].numpy()
            assert result.alignment.weights.shape == (1, 1, len(result.token_ids), len(ids))
            np.testing.assert_allclose(result.alignment.weights, want, atol=1e-5)
            np.testing.assert_allclose(result.alignment.averaged().sum(-1), 1, atol=1e-5)
        assert runtime.align("on").source == ("o", "n", "</s>")


def test_bad_texts(recurrent_bundle: Path) -> None:
    with Translator.load(recurrent_bundle) as runtime:
        with pytest.raises(InputError, match="a text to translate is empty; leave it out"):
            runtime.translate("")
        with pytest.raises(
            ContextLengthError, match="has 41 tokens, the end token included; the model reads 32"
        ):
            runtime.translate("a" * 40)
        assert runtime.translate("a" * 40, truncation="head").dropped == 9
        with pytest.raises(InputError, match="max_new_tokens=33 must be at most 32"):
            runtime.translate("on", max_new_tokens=33)


def test_unknown_letters_are_named_once_a_call(
    recurrent_bundle: Path, caplog: pytest.LogCaptureFixture
) -> None:
    texts = ["Ö7", "on", "7 on Ö"]
    with Translator.load(recurrent_bundle) as runtime, caplog.at_level(logging.WARNING, "planforge"):
        for text, result in zip(texts, runtime.translate(texts), strict=True):
            assert result.token_ids == write_greedily(make_recurrent(), text)
        runtime.translate("on")
        said = "the model's tokenizer does not know 'Ö', '7'; the model reads its unknown token there"
        assert [record.getMessage() for record in caplog.records] == [said]
        caplog.clear()
        next(iter(runtime.stream("ABCDEFGHIJ")))
        assert "'A', 'B', 'C', 'D', 'E', 'F', 'G', 'H', ...; the model reads" in caplog.text


def test_g2ps_pronunciations_are_numpys(tmp_path: Path) -> None:
    arrays = write_checkpoint(tmp_path / "checkpoint.npz")
    import_g2p(tmp_path / "checkpoint.npz", tmp_path / "g2p")
    bundle = export(
        tmp_path / "g2p", tmp_path / "bundle", target=["cpu"], precision=["fp32"], verify=False
    ).bundle
    words = ["planforge", "bahdanau", "a", "zyzzyva", "o'clock"]
    with Translator.load(bundle) as model:
        for word, result in zip(words, model.translate(words), strict=True):
            found = pronounce(arrays, word)
            assert [token for token in result.token_ids if token != END] == found
            assert result.text == " ".join(PHONEMES[token] for token in found if token > END)
        assert model.translate("Naïve").token_ids == model.translate("naive").token_ids
