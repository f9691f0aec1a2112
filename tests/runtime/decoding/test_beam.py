from __future__ import annotations

import functools
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planforge.runtime.bundle.defaults import SequenceBias, TokenRules
from planforge.runtime.decoding.beam import BeamSearch, Hypothesis, Search
from planforge.runtime.decoding.beam_candidates import BLOCKS_OF, find_candidates
from planforge.runtime.decoding.constraints import Constraints, constrain
from planforge.runtime.errors import BackendError, InputError

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

transformers.logging.set_verbosity_error()
torch.set_num_threads(1)

Float32 = npt.NDArray[np.float32]
fast = settings(deadline=None, max_examples=100)
EOS = 0
PAD = 59
VOCABULARY = 60
RULES = TokenRules(
    bad_words=((12, 30), (40, 41)),
    suppress_tokens=(PAD, 9),
    begin_suppress_tokens=(21, 33, 48),
    sequence_bias=(SequenceBias((17,), 2.0), SequenceBias((PAD, 25), 3.0), SequenceBias((30, 31), -4.0)),
    decay_start=3,
    decay_factor=0.8,
)
MARIAN = Constraints(eos=(EOS,), suppressed=(PAD,))
TINY: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    **dict.fromkeys(("encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 48),
    **{"pad_token_id": PAD, "eos_token_id": EOS, "decoder_start_token_id": PAD},
    "init_std": 0.3,
    "tie_word_embeddings": False,
}


@functools.cache
def marian() -> Any:
    """A random Marian made to give varied text, which ends at unequal steps; check_varied looks."""
    torch.manual_seed(16)
    model = transformers.MarianMTModel(transformers.MarianConfig(**TINY)).eval()
    model.generation_config = transformers.GenerationConfig(pad_token_id=PAD, decoder_start_token_id=PAD)
    with torch.no_grad():
        # Each token leads to another one, and the layers are too weak to always overrule that.
        embeddings = model.model.decoder.embed_tokens.weight.normal_(0, 2)
        model.lm_head.weight.copy_(embeddings[torch.randperm(VOCABULARY)] * 0.1)
        for layer in model.model.decoder.layers:
            layer.self_attn.out_proj.weight *= 0.15
            layer.encoder_attn.out_proj.weight *= 0.25
            layer.fc2.weight *= 0.3
        model.final_logits_bias[:, EOS] += 2
    return model.double()  # its float32 logits are the same with and without a cache then


def some_sources(count: int) -> Any:
    return torch.randint(1, PAD, (count, 6), generator=torch.Generator().manual_seed(1))


def ours(sources: Any, search: Search) -> list[list[Hypothesis]]:
    beams = BeamSearch([[PAD]] * len(sources), search)
    with torch.no_grad():
        encoded = marian().model.encoder(sources).last_hidden_state
        encoded = encoded.repeat_interleave(search.num_beams, 0)
        while not beams.done:
            histories = torch.tensor(beams.histories)
            out = marian()(encoder_outputs=(encoded,), decoder_input_ids=histories, use_cache=False)
            beams.advance(out.logits[:, -1].float().numpy())
    return beams.list_hypotheses()


def generation_config(search: Search) -> Any:
    rules = search.constraints
    options: dict[str, Any] = {
        "bad_words_ids": [*([token] for token in rules.suppressed), *map(list, rules.rules.bad_words)]
        or None,
        "suppress_tokens": list(rules.rules.suppress_tokens) or None,
        "begin_suppress_tokens": list(rules.rules.begin_suppress_tokens) or None,
        "sequence_bias": [[list(bias.tokens), bias.added] for bias in rules.rules.sequence_bias] or None,
        "exponential_decay_length_penalty": (
            (rules.rules.decay_start, rules.rules.decay_factor) if rules.rules.decay_factor != 1.0 else None
        ),
        "forced_bos_token_id": rules.forced_bos,
        "forced_eos_token_id": rules.forced_eos,
        "no_repeat_ngram_size": rules.no_repeat_ngram_size,
        "min_new_tokens": rules.min_new_tokens or None,
        "renormalize_logits": rules.renormalize or None,
        "eos_token_id": list(rules.eos) or None,
        "max_new_tokens": search.max_new_tokens,
        "num_beams": search.num_beams,
        "num_return_sequences": search.n_best,
    }
    if search.num_beams > 1:
        options |= {"length_penalty": search.length_penalty, "early_stopping": search.early_stopping}
    special = {"pad_token_id": PAD, "decoder_start_token_id": PAD}
    returned = {"return_dict_in_generate": True, "output_scores": True}
    given = {name: value for name, value in options.items() if value is not None}
    return transformers.GenerationConfig(**given, **special, **returned)


def theirs(sources: Any, search: Search) -> list[list[tuple[tuple[int, ...], float | None]]]:
    """The token ids and the score of each sequence that transformers returns for a source."""
    out = marian().generate(sources, generation_config=generation_config(search))
    results: list[tuple[tuple[int, ...], float | None]] = []
    for number, (_, *ids) in enumerate(out.sequences.tolist()):
        if search.num_beams > 1:  # what follows is padding, which is a token like others here
            length = int((out.beam_indices[number] >= 0).sum())
            results.append((tuple(ids[:length]), float(out.sequences_scores[number])))
        else:
            ends = (place for place, token in enumerate(ids, 1) if token in search.constraints.eos)
            results.append((tuple(ids[: next(ends, len(ids))]), None))
    return [results[i : i + search.n_best] for i in range(0, len(results), search.n_best)]


def check_varied(best: list[tuple[int, ...]]) -> None:
    """Else equal results would show little."""
    assert len(set(best)) >= 20
    assert len({len(ids) for ids in best}) >= 8
    assert np.mean([len(set(ids)) for ids in best]) > 4


def check_same(sources: Any, search: Search) -> None:
    expected = theirs(sources, search)
    got = ours(sources, search)
    if len(sources) == 50:
        check_varied([hypotheses[0][0] for hypotheses in expected])
    for mine, others in zip(got, expected, strict=True):
        assert [hypothesis.token_ids for hypothesis in mine] == [ids for ids, _ in others]
        for hypothesis, (ids, score) in zip(mine, others, strict=True):
            if score is not None:
                np.testing.assert_allclose(hypothesis.score, score, atol=1e-4, rtol=0)
            ended = ids[-1] in search.constraints.eos
            assert hypothesis.finish_reason == ("eos" if ended else "length")
            assert ended or len(ids) == search.max_new_tokens


@pytest.mark.parametrize("num_beams", [1, 2, 4])
def test_fifty_sources_as_in_transformers(num_beams: int) -> None:
    search = Search(num_beams=num_beams, n_best=num_beams, max_new_tokens=24, constraints=MARIAN)
    check_same(some_sources(50), search)


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("length_penalty", [0.0, 0.6, 1.0, 1.4, -0.5])
@pytest.mark.parametrize("num_beams", [2, 4])
def test_penalties_and_early_stopping_as_in_transformers(
    num_beams: int, length_penalty: float, early_stopping: Any
) -> None:
    options: dict[str, Any] = {"length_penalty": length_penalty, "early_stopping": early_stopping}
    search = Search(num_beams=num_beams, n_best=num_beams, max_new_tokens=12, constraints=MARIAN, **options)
    check_same(some_sources(10), search)


def test_the_options_make_a_difference_here() -> None:
    options: list[dict[str, Any]] = [
        *({"early_stopping": early} for early in (False, True, "never")),
        *({"length_penalty": penalty} for penalty in (0.0, -0.5)),
    ]
    searches = [Search(num_beams=4, n_best=4, max_new_tokens=12, constraints=MARIAN, **o) for o in options]
    assert len({str(theirs(some_sources(10), search)) for search in searches}) == len(searches)


@pytest.mark.parametrize("num_beams", [1, 3])
@pytest.mark.parametrize(
    "constraints",
    [
        Constraints(eos=(EOS,)),
        Constraints(eos=(EOS, 7, 11), suppressed=(PAD, 5)),
        Constraints(eos=(), suppressed=(PAD,)),
        Constraints(eos=(EOS,), suppressed=(EOS, PAD)),
        Constraints(eos=(EOS,), forced_bos=4),
        Constraints(eos=(EOS,), forced_bos=EOS),
        Constraints(eos=(EOS,), forced_eos=EOS),
        Constraints(eos=(EOS,), forced_bos=4, forced_eos=5, min_new_tokens=3),
        *(Constraints(eos=(EOS,), no_repeat_ngram_size=size) for size in (1, 2, 3)),
        Constraints(eos=(EOS, 7), min_new_tokens=4),
        Constraints(eos=(EOS,), suppressed=(PAD, 5, 9), no_repeat_ngram_size=1, renormalize=True),
        Constraints(eos=(EOS,), suppressed=(PAD,), forced_bos=4, forced_eos=EOS, renormalize=True),
        Constraints(eos=(EOS, 7), rules=RULES),
        Constraints(eos=(EOS,), forced_bos=4, rules=RULES, renormalize=True),
    ],
    ids=str,
)
@pytest.mark.parametrize("max_new_tokens", [4, 12])
def test_constraints_as_in_transformers(
    num_beams: int, constraints: Constraints, max_new_tokens: int
) -> None:
    # Where all is forced transformers has but one hypothesis, and fills up with ones that score -1e9.
    search = Search(num_beams=num_beams, max_new_tokens=max_new_tokens, constraints=constraints)
    check_same(some_sources(8), search)


@fast
@given(
    seed=st.integers(0, 2**32 - 1),
    rows=st.integers(1, 4),
    length=st.integers(1, 9),
    max_new_tokens=st.integers(5, 10),
    constraints=st.builds(
        Constraints,
        eos=st.sampled_from([(), (0,), (0, 3)]),
        suppressed=st.sampled_from([(), (7,), (0, 2, 7)]),
        forced_bos=st.none() | st.integers(0, 4),  # transformers refuses to force what it suppresses
        forced_eos=st.none() | st.integers(0, 4),
        no_repeat_ngram_size=st.none() | st.integers(1, 10),
        min_new_tokens=st.integers(0, 5),
        rules=st.builds(
            TokenRules,
            bad_words=st.sampled_from([(), ((1, 2), (3, 3, 4))]),
            suppress_tokens=st.sampled_from([(), (7,), (5, 6)]),
            begin_suppress_tokens=st.sampled_from([(), (4, 1)]),
        ),
    ),
)
def test_constrain_is_the_processors_of_transformers(
    seed: int, rows: int, length: int, max_new_tokens: int, constraints: Constraints
) -> None:
    random = np.random.default_rng(seed)
    scores = random.normal(size=(rows, 8)).astype(np.float32)
    histories = random.integers(0, 10, (rows, length))  # beyond the scores too: a larger embedding
    config = generation_config(Search(constraints=constraints, max_new_tokens=max_new_tokens))
    config.max_length = 1 + max_new_tokens  # this and the next are what generate() sets
    config._eos_token_tensor = torch.tensor(constraints.eos) if constraints.eos else None
    chain = marian()._get_logits_processor(config, input_ids_seq_length=1)
    expected = chain(torch.from_numpy(histories), torch.from_numpy(scores.copy()))
    constrain(scores, histories.tolist(), constraints, max_new_tokens)
    np.testing.assert_array_equal(scores, expected.numpy())


@fast
@given(
    seed=st.integers(0, 2**32 - 1),
    rows=st.integers(1, 4),
    blocks=st.integers(1, 12),
    count=st.integers(1, 20),
    kinds=st.sampled_from([2, 10, 1000, 10**6]),  # of values: few make many ties
    missing=st.sampled_from([0.0, 0.5, 0.999]),
)
def test_best_candidates_are_the_best_of_all(
    seed: int, rows: int, blocks: int, count: int, kinds: int, missing: float
) -> None:
    random = np.random.default_rng(seed)
    scores = (random.integers(0, kinds, (rows, blocks * BLOCKS_OF)) / 7).astype(np.float32)
    scores[random.random(scores.shape) < missing] = -np.inf
    terms = random.integers(-3, 3, (rows, 3)).astype(np.float32)
    terms[rows - 1, 2] = -np.inf if kinds == 10 else 0  # a dead row
    ranks = random.permutation(rows)
    totals = scores - terms[:, :1] - terms[:, 1:2] + terms[:, 2:]
    expected = sorted(
        (-totals[row, token], ranks[row], token, row) for row, token in np.argwhere(totals > -np.inf)
    )
    got = find_candidates(scores, terms, ranks, count)
    assert [(-c.score, ranks[c.row], c.token, c.row) for c in got] == expected[:count]


def test_full_vocabulary_as_torch() -> None:
    logits = np.random.default_rng(0).normal(0, 3, (4, 58101)).astype(np.float32)
    expected = torch.log_softmax(torch.from_numpy(logits[0]), -1).topk(4)
    beams = BeamSearch([[58100]], Search(num_beams=4, n_best=4, constraints=MARIAN, max_new_tokens=2))
    assert beams.advance(logits) == []  # all rows have been fed the same
    assert beams.tokens == expected.indices.tolist()
    before = logits.copy()
    beams.advance(logits)
    np.testing.assert_array_equal(logits, before)
    got = beams.list_hypotheses()[0]
    again = torch.log_softmax(torch.from_numpy(logits), -1) + expected.values[:, None]
    np.testing.assert_allclose([h.score for h in got], again.flatten().topk(4).values / 2, atol=1e-5)


@fast
@given(
    seed=st.integers(0, 2**32 - 1),
    sources=st.integers(1, 3),
    num_beams=st.integers(1, 5),
    early_stopping=st.sampled_from([False, True, "never"]),
    forced_bos=st.none() | st.just(2),
    vocabulary=st.sampled_from([3, 30]),  # of 3: at first fewer tokens than beams
)
def test_copied_rows_hold_what_their_hypotheses_are(
    seed: int, sources: int, num_beams: int, early_stopping: Any, forced_bos: int | None, vocabulary: int
) -> None:
    random = np.random.default_rng(seed)
    constraints = Constraints(eos=(0,), forced_bos=forced_bos)
    options: dict[str, Any] = {"num_beams": num_beams, "early_stopping": early_stopping}
    beams = BeamSearch([[1]] * sources, Search(constraints=constraints, max_new_tokens=12, **options))
    cache: list[list[int]] = [[] for _ in beams.tokens]
    while not beams.done:
        active = beams.active.copy()
        for row, token in enumerate(beams.tokens):
            cache[row].append(token)
        before = [row.copy() for row in cache]
        copies = beams.advance(random.normal(0, 2, (len(cache), vocabulary)).astype(np.float32))
        for source, target in copies:
            cache[target] = cache[source].copy()
            assert active[source] and source // num_beams == target // num_beams
        assert not {source for source, _ in copies} & {target for _, target in copies}
        assert len({target for _, target in copies}) == len(copies)
        for first in range(0, len(cache), num_beams):
            rows = range(first, first + num_beams)
            if not beams.active[first]:
                assert not any(target in rows for _, target in copies)
                continue
            assert [cache[row] for row in rows] == [beams.histories[row][:-1] for row in rows]
            was = [before[row] for row in rows]
            if all(was.count(text) == 1 for text in was):  # as few as can be: one per child but the first
                parents = {tuple(cache[row]) for row in rows}
                assert sum(target in rows for _, target in copies) == num_beams - len(parents)
    assert [len(row) for row in beams.histories] == [len(cache[0]) + 1] * len(cache)


def test_rows_of_ended_sources_are_ignored() -> None:
    beams = BeamSearch([[3], [3]], Search(max_new_tokens=3, constraints=Constraints(eos=(0,))))
    logits = np.array([[9, 0, 0, 0], [0, 0, 9, 0]], dtype=np.float16)
    beams.advance(logits)
    assert (beams.active, beams.done) == ([False, True], False)
    logits[0] = np.nan
    beams.advance(logits)
    beams.advance(logits)
    assert beams.done
    assert [[h.token_ids for h in found] for found in beams.list_hypotheses()] == [[(0,)], [(2, 2, 2)]]
    assert [found[0].finish_reason for found in beams.list_hypotheses()] == ["eos", "length"]


def test_greedy_takes_the_first_of_equal_logits_and_no_other() -> None:
    row = np.full((1, 6000), 0.9, dtype=np.float32)
    row[0, [20, 300, 500]] = np.nextafter(np.float32(1), np.float32(0)), 1, 1
    logprobs = torch.log_softmax(torch.from_numpy(row), -1)[0]
    assert logprobs[20] == logprobs[300]  # rounded, the lower one of the logits equals the others
    beams = BeamSearch([[1]], Search(constraints=Constraints(eos=(0,)), max_new_tokens=1))
    beams.advance(row)
    assert beams.list_hypotheses()[0][0].token_ids == (300,)
    exact = torch.log_softmax(torch.from_numpy(row).double(), -1)[0, 300]
    np.testing.assert_allclose(beams.list_hypotheses()[0][0].score, exact, atol=1e-6)


@fast
@given(seed=st.integers(0, 2**32 - 1))
def test_the_greedy_path_takes_the_best_of_all_candidates(seed: int) -> None:
    """Tokens, scores and log-probabilities, with constraints that are drawn."""
    random = np.random.default_rng(seed)
    drawn: dict[str, Any] = {
        "renormalize": bool(random.integers(2)),
        "min_new_tokens": int(random.integers(4)),
        "no_repeat_ngram_size": (None, 1, 2)[random.integers(3)],
        "forced_bos": (None, 5)[random.integers(2)],
        "forced_eos": (None, EOS)[random.integers(2)],
        "rules": RULES if random.integers(2) else TokenRules(),
    }
    penalty = float(random.choice([1.0, 1.3]))
    constraints = Constraints(eos=(EOS,), suppressed=(PAD,), **drawn)
    search = Search(constraints=constraints, max_new_tokens=6, repetition_penalty=penalty)
    greedy = BeamSearch([[PAD], [3, 4, 5]], search)
    other = BeamSearch([[PAD], [3, 4, 5]], search)
    other._find_likeliest = other._find_candidates  # type: ignore[method-assign, assignment]
    while not greedy.done:
        logits = random.normal(0, 3, (2, VOCABULARY)).astype(np.float32)
        greedy.advance(logits)
        other.advance(logits)
        assert greedy.histories == other.histories and greedy.logprobs == other.logprobs
    assert other.done and greedy.list_hypotheses() == other.list_hypotheses()


@pytest.mark.parametrize("renormalize", [False, True])
def test_logprobs_of_beams_are_the_models_own(renormalize: bool) -> None:
    """Also where the constraints leave a part of the tokens, and it is made a distribution again."""
    constraints = Constraints(eos=(EOS,), suppressed=(PAD, 1, 2), renormalize=renormalize)
    beams = BeamSearch([[PAD]], Search(num_beams=3, constraints=constraints, max_new_tokens=1, n_best=3))
    logits = np.random.default_rng(0).normal(0, 1, (3, VOCABULARY)).astype(np.float32)
    beams.advance(logits)
    logprobs = torch.from_numpy(logits[0]).log_softmax(-1)
    for found in beams.list_hypotheses()[0]:
        np.testing.assert_allclose(found.logprobs, logprobs[list(found.token_ids)], atol=1e-5)


def test_fewer_hypotheses_where_all_is_forced() -> None:
    search = Search(num_beams=3, n_best=3, max_new_tokens=1, constraints=Constraints(eos=(0,), forced_eos=0))
    beams = BeamSearch([[1]], search)
    beams.advance(np.zeros((3, 9), dtype=np.float32))
    assert beams.list_hypotheses() == [[Hypothesis((0,), 0.0, "eos")]]


def test_constraints_that_leave_nothing() -> None:
    constraints = Constraints(eos=(0,), no_repeat_ngram_size=1, min_new_tokens=5)
    for num_beams in (1, 2):
        beams = BeamSearch([[1]], Search(num_beams=num_beams, constraints=constraints))
        logits = np.zeros((num_beams, 3), dtype=np.float32)
        beams.advance(logits)
        with pytest.raises(InputError, match="leave no token at position 2 of source 0; loosen"):
            beams.advance(logits)


@pytest.mark.parametrize("num_beams", [1, 2])
@pytest.mark.parametrize(("value", "found"), [(np.nan, "NaN"), (np.inf, "infinity")])
def test_bad_logits(num_beams: int, value: float, found: str) -> None:
    beams = BeamSearch([[1], [1]], Search(num_beams=num_beams, constraints=MARIAN))
    logits = np.zeros((2 * num_beams, VOCABULARY), dtype=np.float32)
    logits[num_beams, 7] = value
    with pytest.raises(BackendError, match=f"{found} in row {num_beams}"):
        beams.advance(logits)
