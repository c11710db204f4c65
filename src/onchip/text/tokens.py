"""Texts to tokens: lower-cased words, parts of contractions, and single signs.

A word is a run of letters, marks and digits. A contraction is split before its apostrophe, as in the Penn Treebank:
it's = it 's, don't = do n't; 's 'm 'd 're 've 'll n't are tokens. Every other visible sign is a token of its own.
Blanks and control characters separate tokens. A typographic apostrophe counts as '.
"""

from __future__ import annotations

import functools
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from onchip.kernels.cpu.compiler.jit import address, compiled, entry, ints_at
from onchip.network.recipe import Array

CHUNK_TEXTS = 2_048  # texts that are split at a time
_BLANK, _WORD, _SIGN, _END = range(4)  # kinds of characters; _END ends a text
_KINDS = 1 << 16  # characters with a kind of their own; those beyond are signs
_APOSTROPHE, _D, _E, _L, _M, _N, _R, _S, _T, _V = (ord(letter) for letter in "'delmnrstv")


@dataclass(frozen=True, eq=False)
class Tokens:
    """The tokens of some texts."""

    text: str  # all texts, lower-cased
    codes: Array  # (characters,) int64: its code points
    spans: Array  # (tokens, 2) int64: first character, and the one after the last
    ends: Array  # (texts,) int64: the number of tokens up to the end of each text

    def words(self) -> list[str]:
        return [self.text[start:stop] for start, stop in self.spans.tolist()]


def split_texts(texts: Sequence[str]) -> Tokens:
    """The tokens of a chunk of texts; memory grows with its characters."""
    lower = [text.lower() for text in texts]  # one by one: ten times as fast for those that are ASCII
    text = "".join(f"{each}\0" for each in lower)
    if text.count("\0") != len(texts):
        text = "".join(each.replace("\0", " ") + "\0" for each in lower)
    text = text.replace("\u2019", "'")
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4").astype(np.int64)
    spans, ends = np.empty((len(codes) + 1, 2), np.int64), np.empty(len(texts), np.int64)
    kinds = _kinds()
    found = _split(address(codes), len(codes), address(kinds), address(spans), address(ends), len(ends))
    return Tokens(text, codes, spans[:found], ends)


@functools.cache
def _kinds() -> Array:
    """(_KINDS,) int64: the kind of each character."""
    names = (unicodedata.category(chr(code)) for code in range(_KINDS))
    kinds = np.array([_WORD if name[0] in "LMN" else _SIGN if name[0] in "PS" else _BLANK for name in names])
    kinds[0] = _END
    return kinds


@compiled(inline=True)
def _kind(code: int, kinds: Array) -> int:
    return kinds[code] if code < _KINDS else _SIGN


@compiled()
def _suffix_end(codes: Array, kinds: Array, i: int) -> int:
    """The end of the contraction whose apostrophe is at i: n't or one of 's 'm 'd 're 've 'll; 0 if there is none."""
    first, second, end = codes[i + 1], 0, i + 2  # the text ends with an _END
    if _kind(first, kinds) != _WORD:
        return 0
    if _kind(codes[end], kinds) == _WORD:
        second, end = codes[end], end + 1
        if _kind(codes[end], kinds) == _WORD:
            return 0
    if second == 0:
        is_one = first in (_S, _M, _D) or (first == _T and i > 0 and codes[i - 1] == _N)
    else:
        is_one = (first in (_R, _V) and second == _E) or (first == _L and second == _L)
    return end if is_one else 0


@entry
def _split(codes_at: int, count: int, kinds_at: int, spans_at: int, ends_at: int, texts: int) -> int:
    """Write the span of every token, and the number of tokens up to the end of each text; returns their number."""
    codes, kinds = ints_at(codes_at, count), ints_at(kinds_at, _KINDS)
    spans, ends = ints_at(spans_at, 2 * count + 2), ints_at(ends_at, texts)
    i = found = text = 0
    while i < count:
        start, kind = i, _kind(codes[i], kinds)
        i += 1
        if kind == _BLANK:
            continue
        if kind == _END:
            ends[text] = found
            text += 1
            continue
        if kind == _WORD:
            while _kind(codes[i], kinds) == _WORD:
                i += 1
        elif codes[start] == _APOSTROPHE:
            end = _suffix_end(codes, kinds, start)
            if end > 0:
                i = end
                if codes[start + 1] == _T:  # the n belongs to it
                    start -= 1
                    spans[2 * found - 1] -= 1
                    if spans[2 * found - 1] == spans[2 * found - 2]:
                        found -= 1
        spans[2 * found], spans[2 * found + 1] = start, i
        found += 1
    return found
