"""Texts in files: lines and cells, from any offset, and lines that are no texts."""

from __future__ import annotations

import csv
import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onchip.errors import FormatError, InputError
from onchip.text.records import MAX_LINE, record_error, record_layout


def read(path, columns=(None,)):
    with path.open("rb") as file:
        return list(record_layout(path, columns).records(file))


def write(folder, name, content):
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_lines(tmp_path):
    path = write(tmp_path, "a.txt", '\ufeffgood, "very"\r\n\nbad\nlast é')
    assert [record.cells for record in read(path)] == [('good, "very"',), ("",), ("bad",), ("last é",)]
    assert [record.line for record in read(path)] == [1, 2, 3, 4]
    assert read(write(tmp_path, "b.txt", "")) == []


def test_cells(tmp_path):
    path = write(tmp_path, "a.csv", 'id,text,label\n1,"two\nlines, quoted ""so""",pos\n\n2,plain,neg\n')
    records = read(path, ("text", "last"))
    assert [record.cells for record in records] == [('two\nlines, quoted "so"', "pos"), ("plain", "neg")]
    assert [record.line for record in records] == [2, 5]
    assert read(path, ("first",))[0].cells == ("1",)
    assert read(path)[0].cells[0].startswith("two")  # the column called text
    assert read(write(tmp_path, "a.tsv", "text\tx\na, b\t1\n"))[0].cells == ("a, b",)
    assert read(write(tmp_path, "one.csv", "review\nx\n"))[0].cells == ("x",)


def test_columns_that_are_not_there(tmp_path):
    path = write(tmp_path, "a.csv", "id,review,label\n1,a,b\n")
    for column, what in (("reviews", "did you mean review"), (None, "no column 'text'")):
        with pytest.raises(FormatError, match=what) as caught:
            record_layout(path, (column,))
        assert "a.csv" in str(caught.value)
        assert "id, review, label" in str(caught.value)
    with pytest.raises(FormatError, match="two columns are called 'x'"):
        record_layout(write(tmp_path, "b.csv", "x,x\n"), ("x",))
    with pytest.raises(FormatError, match="empty"):
        record_layout(write(tmp_path, "c.csv", ""))
    with pytest.raises(InputError, match="lines has no columns"):
        record_layout(write(tmp_path, "c.txt", "a"), ("text",))
    with pytest.raises(FormatError, match="no-such"):
        record_layout(tmp_path / "no-such.txt")


@given(st.lists(st.tuples(st.text(alphabet='ab ,"\n\r\té', max_size=8), st.text(max_size=3))))
def test_a_record_can_be_read_from_its_offset(tmp_path_factory, rows):
    text = io.StringIO()
    csv.writer(text).writerows([("text", "x"), *rows])
    path = write(tmp_path_factory.mktemp("csv"), "a.csv", text.getvalue().encode("utf-8", "replace"))
    layout, records = record_layout(path), read(path)
    with path.open("rb") as file:
        for i, record in enumerate(records):
            again = list(layout.records(file, (record.offset, record.line - 1)))
            assert again == records[i:]


def test_lines_that_are_no_texts(tmp_path):
    long = b"x" * (MAX_LINE + 1)
    path = write(tmp_path, "a.txt", b"good\ncaf\xe9 au lait\n" + long + b"\nbad\n" + long * 10)
    records = read(path)
    assert [record.cells for record in records] == [("good",), (), (), ("bad",), ()]
    assert [record.line for record in records] == [1, 2, 3, 4, 5]
    what, got, expected = zip(*(record.problem for record in records if record.problem), strict=True)
    assert what == ("not UTF-8 text", "a line is too long", "a line is too long")
    assert got[0] == "byte e9"
    assert f"{len(long) * 10:,} bytes" in got[2]
    assert expected[0] == "text in UTF-8"
    with pytest.raises(FormatError, match=r"line 2: not UTF-8 text") as caught:
        raise record_error(records[1], "--skip-bad")
    assert "fix or remove line 2, or --skip-bad" in str(caught.value)


def test_a_line_as_long_as_allowed(tmp_path):
    path = write(tmp_path, "a.txt", b"x" * (MAX_LINE - 1) + b"\nb\n" + b"y" * MAX_LINE)
    assert [len(record.cells[0]) for record in read(path)] == [MAX_LINE - 1, 1, MAX_LINE]


def test_rows_that_are_no_cells(tmp_path):
    wide = '"' + "x" * 200_000 + '"'
    path = write(tmp_path, "a.csv", b"text,label\ngood,1\nbad\n" + wide.encode() + b",1\nf\xefne,1\nlast,2\n")
    records = read(path)
    assert [record.cells for record in records if record.problem is None] == [("good",), ("last",)]
    problems = [(record.line, record.problem[0]) for record in records if record.problem]
    assert problems == [(3, "wrong number of cells"), (4, "a line that cannot be read"), (5, "not UTF-8 text")]
