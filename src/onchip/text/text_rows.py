"""Texts as the rows that a network reads: of a file, on demand."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from onchip.errors import FormatError, InputError
from onchip.files import open_input
from onchip.network.graph import Network
from onchip.network.layers import Embedding
from onchip.network.reading import naming_file, show
from onchip.network.recipe import Array
from onchip.text.records import DELIMITERS, RecordLayout, record_error, record_layout
from onchip.text.vocabulary import TOKENISER, Vocabulary

SUFFIXES = (*DELIMITERS, ".txt")  # of files of texts


def text_vocabulary(net: Network) -> Vocabulary:
    """The vocabulary by which a network reads texts; InputError if it reads none."""
    if not net.meaning.words:
        raise InputError(
            f"network '{net.name}' reads no texts", got=", ".join(f"{name}: {t}" for name, t in net.inputs.items()),
            expected="a network with a vocabulary", hint="onchip train sentiment, or onchip.TextClassifier",
        )  # fmt: skip
    if net.meaning.tokeniser != TOKENISER:
        hint = "the version of onchip that wrote the file, or train again"
        raise FormatError("unknown tokeniser", got=show(net.meaning.tokeniser), expected=TOKENISER, hint=hint)
    vocabulary = Vocabulary(net.meaning.words)
    tables = [net.weights[node.weights["weight"]].shape[0] for node in net.nodes if isinstance(node.layer, Embedding)]
    if len(net.inputs) != 1 or len(net.input.row_shape) != 1 or (tables and min(tables) < len(vocabulary)):
        got = f"{len(vocabulary.words):,} words, {', '.join(map(str, net.inputs.values()))}, tables of {tables}"
        raise FormatError(f"the vocabulary of '{net.name}' does not fit", got=got, expected="an id for each word")
    return vocabulary


class TextRows:
    """The texts of a file as rows of ids (n, length) int32, read on demand: memory holds 8 bytes per text.

    The file is read once to find the texts; FormatError names the first line that is none.
    """

    dtype = np.dtype(np.int32)

    def __init__(self, path: Path, vocabulary: Vocabulary, length: int, layout: RecordLayout) -> None:
        self._path, self._vocabulary, self._layout = path, vocabulary, layout
        offsets = array("q")
        with open_input(path) as file, naming_file(path):
            for record in layout.records(file):
                if record.problem is not None:
                    raise record_error(record)
                offsets.append(record.offset)
            offsets.append(file.tell())
        self._offsets = np.frombuffer(offsets, np.int64)
        self.shape = (len(offsets) - 1, length)

    def __len__(self) -> int:
        return self.shape[0]

    def read(self, start: int, stop: int) -> Array:
        stop = min(stop, len(self))
        if start >= stop:
            return self._vocabulary.encode([], self.shape[1])
        begin, end = (int(self._offsets[row]) for row in (start, stop))
        with open_input(self._path) as file, naming_file(self._path):
            file.seek(begin)
            texts = self._layout.first_cells(file.read(end - begin).decode("utf-8", "replace"))
            if len(texts) != stop - start:
                got, expected = f"{len(texts):,} texts", f"{stop - start:,}, as when it was opened"
                hint = "run the command again when the file is complete"
                raise FormatError("the file has changed while it was read", got=got, expected=expected, hint=hint)
        return self._vocabulary.encode(texts, self.shape[1])


def open_texts(path: Path, net: Network, column: str | None = None, is_table: bool | None = None) -> TextRows:
    """The texts of a file for a network with a vocabulary.

    column    of a .csv or .tsv
    is_table  whether a file without a suffix is a .csv
    """
    layout = record_layout(path, (column,), is_table)
    return TextRows(path, text_vocabulary(net), net.input.row_size, layout)


def encode_texts(texts: Sequence[str], net: Network) -> Array:
    """(n, length) int32."""
    for i, text in enumerate(texts):
        if not isinstance(text, str):
            got = f"{type(text).__name__} {show(text)}, number {i}"
            raise InputError("not a text", got=got, expected="str", hint="a list of sentences")
    return text_vocabulary(net).encode(texts, net.input.row_size)
