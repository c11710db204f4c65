"""Texts to tokens: the rule, against a regular expression that states it again."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onchip.text.tokens import split_texts

SUFFIX = r"'(?:s|m|d|re|ve|ll)(?![^\W_])"
RULE = re.compile(rf"n't(?![^\W_])|{SUFFIX}|[^\W_]+?(?=n't(?![^\W_]))|[^\W_]+|[^\w\s]|_")


def words(*texts):
    """The tokens of each text."""
    tokens = split_texts(texts)
    found = tokens.words()
    starts = [0, *tokens.ends.tolist()]
    return [found[start:stop] for start, stop in itertools.pairwise(starts)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("A waste of time.", "a waste of time ."),
        ("It's DON'T can't we'll I'm they've you're he'd", "it 's do n't ca n't we 'll i 'm they 've you 're he 'd"),
        ("does n't it 's", "does n't it 's"),
        ("n't 's", "n't 's"),
        ("o'neill's 'quoted' rock 'n' roll", "o ' neill 's ' quoted ' rock ' n ' roll"),
        ("can’t", "ca n't"),
        ("naïve—café!! 3,5 $ 😀x", "naïve — café ! ! 3 , 5 $ 😀 x"),
        ("snake_case a\0b \x85\x96 c", "snake _ case a b c"),
        ("'", "'"),
        ("", ""),
        (" \t\n ", ""),
        ("मैं हिन्दी", "मैं हिन्दी"),  # marks belong to words
    ],
)
def test_the_rule(text, expected):
    assert words(text) == [expected.split()]


def test_texts_do_not_run_into_each_other():
    assert words("a", "", "b c", "is", "n't", "'s") == [["a"], [], ["b", "c"], ["is"], ["n't"], ["'s"]]
    assert split_texts([]).words() == []
    assert split_texts([]).ends.shape == (0,)
    assert words("x" * 100_000)[0] == ["x" * 100_000]


@given(st.lists(st.text(alphabet="abNnTtsSrREevVlLdm'’ .!_é0\n", max_size=20), max_size=4))
def test_the_rule_on_any_text(texts):
    assert words(*texts) == [RULE.findall(text.lower().replace("’", "'")) for text in texts]


@given(st.lists(st.text(max_size=20), max_size=3))
def test_any_character_is_accepted(texts):
    tokens = split_texts(texts)
    assert len(tokens.ends) == len(texts)
    assert np.all(np.diff(tokens.spans, axis=1) > 0)
    assert not any(any(map(str.isspace, word)) for word in tokens.words())


def test_a_lone_surrogate_is_a_blank():
    assert words("a\ud800b") == [["a", "b"]]
