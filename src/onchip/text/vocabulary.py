"""A vocabulary: words with ids, and texts as rows of ids."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from onchip.errors import InputError
from onchip.kernels.cpu.compiler.jit import address, compiled, entry, ints_at
from onchip.network.reading import show
from onchip.network.recipe import Array
from onchip.text.tokens import CHUNK_TEXTS, split_texts

PADDING, UNKNOWN, FIRST = 0, 1, 2  # ids: after the end of a text, of a word outside the vocabulary, of the first word
TOKENISER = "onchip-1"  # the rule of text/tokens.py, by the name that files store
MAX_LENGTH = 256  # tokens of a text that a new network reads, unless it is chosen
_FITTING = 0.99
_FACTOR = 1_099_511_628_211  # of FNV-1a


@dataclass(frozen=True)
class Vocabulary:
    """Word i has id FIRST + i."""

    words: tuple[str, ...]

    def __len__(self) -> int:
        """The number of ids: rows of the table that they index."""
        return len(self.words) + FIRST

    @staticmethod
    def of(texts: Sequence[str], size: int, min_count: int = 1) -> Vocabulary:
        """The most frequent words of some texts, for at most `size` ids, each at least min_count times; ties in
        alphabetical order.
        """
        for name, value, least in (("vocabulary", size, FIRST + 1), ("min_count", min_count, 1)):
            if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
                expected, hint = f"a whole number of at least {least}", f"{name}={20_000 if least > 1 else 2}"
                raise InputError(f"bad {name}", got=show(value), expected=expected, hint=hint)
        counts: Counter[str] = Counter()
        for start in range(0, len(texts), CHUNK_TEXTS):
            counts.update(split_texts(texts[start : start + CHUNK_TEXTS]).words())
        frequent = sorted((-count, word) for word, count in counts.items() if count >= min_count)
        return Vocabulary(tuple(word for _, word in frequent[: size - FIRST]))

    def encode(self, texts: Sequence[str], length: int) -> Array:
        """Rows of ids (n, length) int32: the first tokens of each text, then padding."""
        ids = np.zeros((len(texts), length), np.int32)
        for start in range(0, len(texts), CHUNK_TEXTS):
            ids[start : start + CHUNK_TEXTS] = self._encode(texts[start : start + CHUNK_TEXTS], length)
        return ids

    def _encode(self, texts: Sequence[str], length: int) -> Array:
        tokens, (codes, starts, slots) = split_texts(texts), self._table
        ids = np.full((len(texts), length), PADDING, np.int64)
        _look_up(
            address(tokens.codes), address(tokens.spans), address(tokens.ends), len(texts), length,
            address(codes), address(starts), address(slots), len(slots), address(ids),
        )  # fmt: skip
        return ids

    @functools.cached_property
    def _table(self) -> tuple[Array, Array, Array]:
        """The characters of all words, where each begins, and a hash table of words by their characters (open
        addressing, at most half full; -1: empty)."""
        codes = np.frombuffer("".join(self.words).encode("utf-32-le", "surrogatepass"), "<u4").astype(np.int64)
        codes = np.append(codes, 0)  # never empty
        starts = np.zeros(len(self.words) + 1, np.int64)
        np.cumsum([len(word) for word in self.words], out=starts[1:])
        slots = np.full(2 << len(self).bit_length(), -1, np.int64)
        _insert_words(address(codes), address(starts), len(self.words), address(slots), len(slots))
        return codes, starts, slots

    def __getstate__(self) -> dict[str, object]:
        """Without the table, which is as large as the words."""
        return {"words": self.words}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)


def token_counts(texts: Sequence[str]) -> Array:
    """(n,) int64: the number of tokens of each text."""
    chunks = (split_texts(texts[start : start + CHUNK_TEXTS]).ends for start in range(0, len(texts), CHUNK_TEXTS))
    return np.concatenate([np.diff(ends, prepend=0) for ends in chunks] or [np.zeros(0, np.int64)])


@compiled()
def _find_slot(
    codes: Array, start: int, stop: int, words: Array, starts: Array, slots: Array, n_slots: int
) -> int:  # fmt: skip
    """The slot of the word codes[start:stop], or the empty one where it belongs."""
    key = 1_469_598_103_934_665_603
    for i in range(start, stop):
        key = (key ^ codes[i]) * _FACTOR
    slot = (key ^ (key >> 29)) & (n_slots - 1)
    while slots[slot] >= 0:
        first = starts[slots[slot]]
        if starts[slots[slot] + 1] - first == stop - start:
            i = 0
            while i < stop - start and words[first + i] == codes[start + i]:
                i += 1
            if i == stop - start:
                break
        slot = (slot + 1) & (n_slots - 1)
    return slot


@entry
def _insert_words(words_at: int, starts_at: int, count: int, slots_at: int, n_slots: int) -> int:
    starts, slots = ints_at(starts_at, count + 1), ints_at(slots_at, n_slots)
    words = ints_at(words_at, starts[count] + 1)
    for word in range(count):
        slots[_find_slot(words, starts[word], starts[word + 1], words, starts, slots, n_slots)] = word
    return 0


@entry
def _look_up(
    codes_at: int, spans_at: int, ends_at: int, texts: int, length: int, words_at: int, starts_at: int, slots_at: int,
    n_slots: int, ids_at: int,
) -> int:  # fmt: skip
    """The ids of the first `length` tokens of each text."""
    ends, ids, slots = ints_at(ends_at, texts), ints_at(ids_at, texts * length), ints_at(slots_at, n_slots)
    spans = ints_at(spans_at, 2 * ends[texts - 1])
    words, starts, codes = ints_at(words_at, 1), ints_at(starts_at, 1), ints_at(codes_at, 1)
    token = 0
    for text in range(texts):
        for i in range(min(length, ends[text] - token)):
            at = 2 * (token + i)
            word = slots[_find_slot(codes, spans[at], spans[at + 1], words, starts, slots, n_slots)]
            ids[text * length + i] = FIRST + word if word >= 0 else UNKNOWN
        token = ends[text]
    return 0


def fitting_length(texts: Sequence[str], least: int) -> int:
    """The number of tokens that 99 % of the texts have at most, from `least` to MAX_LENGTH."""
    counts = np.sort(token_counts(texts))
    wanted = int(counts[math.ceil(_FITTING * len(counts)) - 1]) if len(counts) else 0
    return max(least, min(MAX_LENGTH, wanted))
