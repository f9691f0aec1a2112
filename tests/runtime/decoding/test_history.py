from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from planforge.runtime.decoding.history import TokenHistory

tokens = st.lists(st.integers(0, 2**40), max_size=200)


@given(tokens, tokens, st.slices(50))
def test_it_is_a_list_that_only_grows(prompt: list[int], answer: list[int], where: slice) -> None:
    history = TokenHistory(prompt)
    expected = list(prompt)
    for token in answer:
        history.append(token)
        expected.append(token)
        assert history[-1] == token
    assert list(history) == expected == history[:]
    assert len(history) == len(expected) and history[where] == expected[where]
    assert all(type(token) is int for token in history)
    np.testing.assert_array_equal(np.asarray(history, np.int64), np.array(expected, np.int64))


@given(
    st.lists(st.integers(0, 2**40), max_size=20),
    st.lists(st.tuples(st.integers(0, 2**40), st.booleans()), min_size=65, max_size=200),
)
def test_it_may_be_read_as_an_array_at_any_time(prompt: list[int], answer: list[tuple[int, bool]]) -> None:
    history = TokenHistory(prompt)
    expected = list(prompt)
    reads = []
    for token, is_read in answer:
        history.append(token)
        expected.append(token)
        if is_read:
            reads.append((np.asarray(history), list(expected)))
            np.testing.assert_array_equal(*reads[-1])
    np.testing.assert_array_equal(np.asarray(history), expected)
    for read, then in reads:  # what was read stays
        np.testing.assert_array_equal(read, then)


def test_reading_it_again_converts_what_is_new() -> None:
    history = TokenHistory([1, 2, 3])
    history.append(4)
    first = np.asarray(history)
    assert np.shares_memory(first, np.asarray(history, np.int64))
    history.append(5)
    np.testing.assert_array_equal(first, [1, 2, 3, 4])  # what was read stays
    assert not np.shares_memory(np.array(history), np.asarray(history))
