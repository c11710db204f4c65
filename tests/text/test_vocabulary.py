"""A vocabulary: which words have an id, and texts as rows of ids."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onchip.errors import InputError
from onchip.text.tokens import CHUNK_TEXTS, split_texts
from onchip.text.vocabulary import FIRST, MAX_LENGTH, PADDING, UNKNOWN, Vocabulary, fitting_length, token_counts


def test_the_most_frequent_words_come_first():
    texts = ["b b a", "a c", "b d"]
    assert Vocabulary.of(texts, 100).words == ("b", "a", "c", "d")
    assert Vocabulary.of(texts, 100, min_count=2).words == ("b", "a")
    assert Vocabulary.of(texts, 3).words == ("b",)
    assert len(Vocabulary.of(texts, 3)) == 3
    assert len(Vocabulary.of([], 3)) == FIRST


def test_ids_are_those_of_the_words_then_padding():
    vocabulary = Vocabulary(("good", "bad", "n't"))
    ids = vocabulary.encode(["Good, isn't bad", "", "bad bad bad bad bad"], 4)
    assert ids.dtype == np.int32
    assert ids.tolist() == [[2, UNKNOWN, UNKNOWN, 4], [PADDING] * 4, [3, 3, 3, 3]]
    assert vocabulary.encode([], 4).shape == (0, 4)
    assert Vocabulary(()).encode(["a"], 2).tolist() == [[UNKNOWN, PADDING]]


@given(st.lists(st.text(alphabet="abcd e'", max_size=12), max_size=6), st.integers(1, 7))
def test_ids_are_a_dictionarys(texts, length):
    vocabulary = Vocabulary.of(texts[::2], 20)
    index = {word: FIRST + i for i, word in enumerate(vocabulary.words)}
    expected = [[index.get(word, UNKNOWN) for word in split_texts([text]).words()][:length] for text in texts]
    assert vocabulary.encode(texts, length).tolist() == [row + [PADDING] * (length - len(row)) for row in expected]


def test_many_texts_and_words_are_encoded_in_chunks():
    texts = [f"word{i} other{i % 7}" for i in range(2 * CHUNK_TEXTS + 3)]
    vocabulary = Vocabulary.of(texts, 100_000)
    ids = vocabulary.encode(texts, 2)
    assert len(set(ids[:, 0].tolist())) == len(texts)
    assert all(vocabulary.words[i - FIRST] == f"word{n}" for n, i in enumerate(ids[:, 0].tolist()))
    np.testing.assert_array_equal(
        ids[[5, CHUNK_TEXTS, -1]], vocabulary.encode([texts[5], texts[CHUNK_TEXTS], texts[-1]], 2)
    )


def test_a_vocabulary_is_pickled_without_its_table():
    vocabulary = Vocabulary(tuple(f"w{i}" for i in range(1_000)))
    before = len(pickle.dumps(vocabulary))
    ids = vocabulary.encode(["w5 w7"], 3)
    assert len(pickle.dumps(vocabulary)) == before
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(vocabulary)).encode(["w5 w7"], 3), ids)


@pytest.mark.parametrize(("size", "least"), [(2, 1), (True, 1), (9.5, 1), (10, 0), (10, "2")])
def test_bad_sizes(size, least):
    with pytest.raises(InputError, match=r"bad (vocabulary|min_count)"):
        Vocabulary.of(["a"], size, least)


def test_a_length_that_99_of_100_texts_fit_in():
    texts = ["a " * n for n in range(1, 101)]
    assert token_counts(texts).tolist() == list(range(1, 101))
    assert fitting_length(texts, 5) == 99
    assert fitting_length(["a b"], 5) == 5
    assert fitting_length([], 5) == 5
    assert fitting_length(["a " * 1_000], 5) == MAX_LENGTH
