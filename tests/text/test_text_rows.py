"""Texts of a file as rows of ids: any range of them, and networks that read none."""

from __future__ import annotations

import dataclasses
import pickle

import numpy as np
import pytest

from onchip.errors import FormatError, InputError
from onchip.network.build import mlp
from onchip.network.meaning import Meaning
from onchip.network.text_cnn import text_cnn
from onchip.text.text_rows import encode_texts, open_texts, text_vocabulary
from onchip.text.vocabulary import TOKENISER, Vocabulary

WORDS = ("good", "bad", "film", "é")
NET = text_cnn(len(WORDS) + 2, 6, 2, embedding=4, channels=3).replace(meaning=Meaning(words=WORDS, tokeniser=TOKENISER))


@pytest.mark.parametrize(
    ("name", "content", "column"),
    [
        ("a.txt", '\ufeffgood film\r\n\nbad, "bad" é\nfilm', None),
        ("a.csv", 'id,review\n1,good film\n2,"\n"\n\n3,"bad, ""bad""\né"\n4,film', "review"),
        ("a.tsv", "review\tid\ngood film\t1\n\t2\nbad, bad é\t3\nfilm\t4\n", "first"),
    ],
)
def test_any_range_of_a_file(tmp_path, name, content, column):
    path = tmp_path / name
    path.write_bytes(content.encode())
    rows = open_texts(path, NET, column)
    texts = ["good film", "", "bad, bad é", "film"] if name == "a.tsv" else ["good film", "", 'bad, "bad" é', "film"]
    expected = Vocabulary(WORDS).encode(texts, 6)
    assert (rows.shape, rows.dtype, len(rows)) == ((4, 6), np.int32, 4)
    for start in range(5):
        for stop in range(start, 6):
            np.testing.assert_array_equal(rows.read(start, stop), expected[start:stop])
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(rows)).read(1, 3), expected[1:3])


def test_an_empty_file(tmp_path):
    (tmp_path / "a.txt").touch()
    assert open_texts(tmp_path / "a.txt", NET).read(0, 9).shape == (0, 6)


def test_a_line_that_is_no_text_is_named(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"good\ncaf\xe9\n")
    with pytest.raises(FormatError, match=r"a\.txt: line 2: not UTF-8"):
        open_texts(path, NET)


def test_a_file_that_becomes_shorter(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("good\nbad\nfilm\n")
    rows = open_texts(path, NET)
    path.write_text("good\n")
    with pytest.raises(FormatError, match="changed while it was read"):
        rows.read(0, 3)
    table = tmp_path / "a.csv"
    table.write_text("id,text\n1,good\n2,bad\n")
    rows = open_texts(table, NET)
    table.write_text("id,text\n1\n2222,ba\n")
    with pytest.raises(FormatError, match="changed while it was read"):
        rows.read(0, 2)


def test_networks_that_read_no_texts():
    with pytest.raises(InputError, match="reads no texts"):
        text_vocabulary(mlp(2, 3))
    other = NET.replace(meaning=dataclasses.replace(NET.meaning, tokeniser="other-1"))
    with pytest.raises(FormatError, match="unknown tokeniser"):
        text_vocabulary(other)
    long = NET.replace(meaning=dataclasses.replace(NET.meaning, words=(*WORDS, "more")))
    with pytest.raises(FormatError, match="does not fit"):
        text_vocabulary(long)
    with pytest.raises(InputError, match="not a text"):
        encode_texts(["good", 3], NET)
    assert encode_texts(["good"], NET).tolist() == [[2, 0, 0, 0, 0, 0]]
