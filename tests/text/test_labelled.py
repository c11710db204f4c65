"""Labelled texts: tables, folders and the files of MR and SST-2; what is wrong is named by file and line."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from onchip.errors import FormatError, InputError
from onchip.text.labelled import find_sets, read_labelled


def write(folder, name, content):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def pairs(path, **how):
    found = read_labelled(path, **how)
    return list(zip(found.texts, found.labels, strict=True))


def test_a_table(tmp_path):
    path = write(tmp_path, "a.csv", "review,stars\nfine,good\nawful, bad \n")
    assert pairs(path, column="review", label="stars") == [("fine", "good"), ("awful", "bad")]
    assert pairs(path, column="review", label="last") == pairs(path, column="first", label="stars")
    assert pairs(write(tmp_path, "b.tsv", "text\tlabel\na, b\tx\n")) == [("a, b", "x")]


def test_a_file_or_a_folder_per_class(tmp_path):
    write(tmp_path, "mr/rt-polarity.pos", "fine\n")
    write(tmp_path, "mr/rt-polarity.neg", "awful\nbad\n")
    write(tmp_path, "mr/README.original.txt", "about the data")
    assert pairs(tmp_path / "mr") == [("awful", "negative"), ("bad", "negative"), ("fine", "positive")]
    write(tmp_path, "topics/sports.txt", "a goal\n")
    write(tmp_path, "topics/arts.txt", "a play\n")
    assert pairs(tmp_path / "topics") == [("a play", "arts"), ("a goal", "sports")]
    for name, text in (("pos/1.txt", "fine"), ("pos/2.txt", "good\nnice"), ("neg/1.txt", "bad")):
        write(tmp_path, f"imdb/{name}", text)
    assert pairs(tmp_path / "imdb") == [
        ("bad", "negative"),
        ("fine", "positive"),
        ("good", "positive"),
        ("nice", "positive"),
    ]
    write(tmp_path, "imdb/other.txt", "x")
    with pytest.raises(InputError, match="files and folders"):
        read_labelled(tmp_path / "imdb")


def test_lines_that_begin_with_the_label(tmp_path):
    for name in ("train", "dev", "test"):
        write(tmp_path, f"stsa.binary.{name}", "1 a fine film\n0 awful\n")
    assert pairs(tmp_path / "stsa.binary.train") == [("a fine film", "positive"), ("awful", "negative")]
    assert {name: path.name for name, path in find_sets(tmp_path).items()} == {
        "train": "stsa.binary.train", "dev": "stsa.binary.dev", "test": "stsa.binary.test"}  # fmt: skip
    assert pairs(write(tmp_path, "own.train", "1 a\n")) == [("a", "1")]
    assert find_sets(tmp_path) == {}  # two training sets
    assert find_sets(tmp_path / "stsa.binary.train") == {}


BAD = [
    ("rt.pos", b"fine\n\nbad\n", 2, "no text"),
    ("rt.pos", b"caf\xe9\nfine\n", 1, "not UTF-8"),
    ("rt.pos", b"fine\n" + b"x" * 10_000_000 + b"\n", 2, "too long"),
    ("a.csv", b"text,label\nfine,1\n ,1\n", 3, "no text"),
    ("a.csv", b"text,label\nfine,\nbad,1\n", 2, "no label"),
    ("a.csv", b"text,label\nfine\nbad,1\n", 2, "wrong number of cells"),
    ("a.train", b"1\n1 fine\n", 1, "no text"),
]


@pytest.mark.parametrize(("name", "content", "line", "what"), BAD)
def test_a_bad_line_is_named_or_skipped(tmp_path, name, content, line, what):
    path = write(tmp_path, f"data/{name}", content)
    source = path.parent if name == "rt.pos" else path
    with pytest.raises(FormatError, match=f"{path}: line {line}: .*{what}") as caught:
        read_labelled(source)
    assert "--skip-bad" in str(caught.value)
    found = read_labelled(source, skip_bad=True)
    assert found.skipped == 1
    assert f"line {line}" in found.first_skipped
    assert str(path) in found.first_skipped
    assert found.texts
    assert set(found.texts) <= {"fine", "bad"}


def test_what_has_no_labels(tmp_path):
    with pytest.raises(InputError, match="has no labels"):
        read_labelled(write(tmp_path, "a.txt", "fine\n"))
    with pytest.raises(InputError, match="has no columns"):
        read_labelled(tmp_path / "a.txt", column="text")
    with pytest.raises(FormatError, match="no-such"):
        read_labelled(tmp_path / "no-such")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FormatError, match="is empty"):
        read_labelled(tmp_path / "empty")


@pytest.mark.skipif("ONCHIP_DATA" not in os.environ, reason="no real data: ONCHIP_DATA is not set")
def test_the_real_sets():
    folder = Path(os.environ["ONCHIP_DATA"])
    found = read_labelled(folder / "sentiment-mr")
    assert [found.labels.count(label) for label in ("negative", "positive")] == [5331, 5331]
    sizes = {name: len(read_labelled(path).texts) for name, path in find_sets(folder / "sentiment-sst2").items()}
    assert sizes == {"train": 6920, "dev": 872, "test": 1821}
