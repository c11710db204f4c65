"""Tables read back as written; errors name line and column."""

from __future__ import annotations

import csv

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from onchip.errors import FormatError, OnchipError
from onchip.formats.tables import csv_rows
from onchip.formats.tables.csv_rows import csv_columns
from onchip.formats.tables.raw_table import Wanted
from onchip.network.meaning import Column

SETTINGS = settings(max_examples=60)
WORDS = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs", "Z"]), min_size=1, max_size=6)


def read_csv(path, label=None, words=True, columns=()):
    """A table of numbers, and its labels."""
    return csv_rows.read_csv(path, Wanted(label, words, tuple(map(Column, columns)), numbers=True))


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "table.csv"

    def write(text: str | bytes):
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


@SETTINGS
@given(
    values=hnp.arrays("f4", hnp.array_shapes(min_dims=2, max_dims=2, max_side=5),
                      elements=st.floats(width=32, allow_nan=False, allow_infinity=False)),
    data=st.data(), at=st.sampled_from(["first", "last", "name", None]), has_header=st.booleans(),
    end=st.sampled_from(["\n", "\r\n"]), bom=st.booleans(),
)  # fmt: skip
def test_what_the_csv_module_writes_is_read(tmp_path, values, data, at, has_header, end, bom):
    n, width = values.shape
    labels = data.draw(st.lists(WORDS, min_size=n, max_size=n))
    lines = [[repr(float(v)) for v in row] for row in values]
    header = [f"c {i}" for i in range(width)]
    if at is not None:
        place = {"first": 0, "last": width, "name": width // 2}[at]
        for line, label in zip(lines, labels, strict=True):
            line.insert(place, label)
        header.insert(place, 'the "label", so')
    with (tmp_path / "t.csv").open("w", encoding="utf-8-sig" if bom else "utf-8", newline="") as file:
        csv.writer(file, lineterminator=end).writerows(
            ([header] if has_header or at == "name" else []) + lines,
        )
    rows = read_csv(tmp_path / "t.csv", 'the "label", so' if at == "name" else at)
    np.testing.assert_array_equal(rows.cells, values)
    assert rows.cells.dtype == np.float32
    assert rows.cells.flags.c_contiguous
    assert [rows.words[i] for i in rows.labels] == labels if at is not None else rows.labels is None


def test_numbers_as_labels(table):
    rows = read_csv(table("a,b\n1,2.5\n3,-4\n"), "a", words=False)
    assert rows.labels.tolist() == [1, 3]
    assert rows.labels.dtype == np.float32
    assert rows.cells.tolist() == [[2.5], [-4]]


def test_a_first_line_of_numbers_is_a_row(table):
    assert read_csv(table("1,2,x\n3,4,y"), "last").cells.tolist() == [[1, 2], [3, 4]]
    assert read_csv(table("a,b,x\n\n3,4,y\n\n"), "last").cells.tolist() == [[3, 4]]


@pytest.mark.parametrize(("text", "label", "words"), [
    ("a,b\n1,x\nz,y\n", "last", ["line 3, column 1 (a): not a number", "'z'"]),
    ("1,2,x\n3,z,y\n", "last", ["line 2, column 2: not a number"]),
    ("1,2z,x\n3,4,y\n", "last", ["line 1, column 2: not a number"]),  # no header: another cell is a number
    ("a,b,c\n1,2,x\n", "b", ["line 2, column 3 (c)", "'x'"]),
    ("1,,x\n", "last", ["line 1, column 2: not a number", "an empty cell"]),
    ("1,2,\n", "last", ["line 1, column 3: no label"]),
    ("1,nan,x\n", "last", ["line 1, column 2", "'nan'"]),
    ("1,2,x\n1,-inf,x\n", "last", ["line 2, column 2"]),
    ("1,1e39,x\n", "last", ["line 1, column 2", "finite float32"]),
    ("1,1_0,x\n", "last", ["'1_0'"]),
    ("1,0x10,x\n", "last", ["'0x10'"]),
    ("1,2,x\n3,4\n", "last", ["line 2: wrong number of cells", "2", "3, as in the first line"]),
    ("1,2,x\n3,4,y,5\n", "last", ["line 2: wrong number of cells"]),
    ("a,b\n1,2,x\n3,4,y\n", "last", ["line 2: wrong number of cells", "2, as in the first line"]),
    ('1,2,"x\ny"\n3,q,z\n', "last", ["line 3, column 2", "'q'"]),
    ("", "last", ["the table is empty"]),
    ("\n1,2\n", "last", ["the table is empty"]),
    ("a,b\n\n", "last", ["no row", "only a header"]),
    ("a b c\n1 2 3\n", "last", ["no column besides the label"]),
    ("a,b\n1,2\n", "c", ["no column has this name", "one of the first line: a, b"]),
    ("a,a,b\n1,2,3\n", "a", ["several columns have this name"]),
    ("a,b,a,x\n1,2,3,y\n", "last", ["two columns are called 'a'", "columns 1 and 3 of line 1", "rename or remove one"]),
    ("a,b,a\n1,2,3\n", "last", ["two columns are called 'a'"]),
    (",b,,x\n1,2,3,y\n", "x", ["two columns are called ''"]),
    (b"a,b\n1,\xff\n", "last", ["not UTF-8 text", "byte ff"]),
    (b"a," + b"1" * (1 << 18) + b"\n1,2", "last", ["line 1", "field larger"]),
    (b"1" * (1 << 25), "last", ["line 1 is too long"]),
    (b"1,2,x\n3,4,y\n" + b"1" * (1 << 23), "last", ["line 3 is too long"]),
    (b"1,2,x\n3,4,y\n" + bytes(1 << 23), "last", ["line 3 is too long"]),
])  # fmt: skip
def test_errors_name_line_and_column(table, text, label, words):
    with pytest.raises(FormatError) as caught:
        read_csv(table(text), label)
    message = str(caught.value)
    assert len(message) < 1500
    for word in ["table.csv", "got:", "expected:", "try:", *words]:
        assert word in message


def test_columns_that_are_read_need_unique_names(table):
    """Unread columns may have any name; without a header there are no names."""
    text = "id,a,id,b\n1,2,3,4\n"
    with pytest.raises(FormatError, match="two columns are called 'id'"):
        read_csv(table(text))
    with pytest.raises(FormatError, match="two columns are called 'id'"):
        csv_columns(table(text), Wanted())
    with pytest.raises(FormatError, match="two columns are called 'id'"):
        read_csv(table(text), columns=("a", "id"))
    with pytest.raises(FormatError, match="the network has two columns called 'a'"):
        read_csv(table(text), columns=("a", "a"))
    assert read_csv(table(text), columns=("b", "a")).cells.tolist() == [[4, 2]]
    assert read_csv(table("1,1,2\n")).cells.tolist() == [[1, 1, 2]]


def test_a_bad_cell_of_a_wide_table(table):
    """Searching the columns for each cell would take 10^10 steps."""
    names = [f"c{i}" for i in range(150_000)]
    text = f"{','.join(names)}\n{','.join(['1'] * (len(names) - 1))},x\n"
    with pytest.raises(FormatError, match=r"line 2, column 150000 \(c149999\)"):
        read_csv(table(text))
    with pytest.raises(FormatError, match="column 150000"):
        read_csv(table(text), columns=names[::-1])


def test_labels_that_must_be_numbers(table):
    with pytest.raises(FormatError, match=r"line 3, column 2 \(b\): not a number"):
        read_csv(table("a,b\n1,2\n3,x\n"), "last", words=False)


def test_missing_file(tmp_path):
    with pytest.raises(FormatError, match="No such file"):
        read_csv(tmp_path / "none.csv")


@SETTINGS
@given(place=st.integers(0, 10**6), byte=st.integers(0, 255), cut=st.integers(0, 10**6))
def test_damage_is_an_error_or_rows(tmp_path, place, byte, cut):
    data = bytearray(b'x,y,"c d"\n1,2,a\n-3e4,.5,"b,c"\n7,8,d\n')
    data[place % len(data)] = byte
    (tmp_path / "t.csv").write_bytes(data[: cut % (2 * len(data)) + 1])
    try:
        rows = read_csv(tmp_path / "t.csv", "last")
        assert len(rows.cells) == len(rows.labels)
        assert np.isfinite(rows.cells).all()
    except OnchipError as error:
        assert isinstance(error, FormatError)  # noqa: PT017


def test_a_first_line_that_is_not_finite_is_a_row_and_refused(table):
    with pytest.raises(FormatError, match="line 1"):
        read_csv(table("nan,0\n2,1\n3,0\n"), "last", words=True)
