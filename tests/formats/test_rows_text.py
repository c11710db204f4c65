"""Rows as text: reads what fscanf reads, writes what printf writes; errors name the line."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onchip.errors import FormatError, ShapeError
from onchip.formats.tables import rows_text
from onchip.formats.tables.rows_text import TextWriter, read_rows_text

WHITE = st.text(" \n\t\r\v\f", min_size=1, max_size=3)
NUMBERS = st.floats(width=32, allow_nan=False, allow_infinity=False)
FORMATS = st.sampled_from(["{!r}", "{:.9e}", "{:+.9g}", "{:.9E}"])


@pytest.fixture
def path(tmp_path):
    return tmp_path / "input.txt"


@given(data=st.data(), rows=st.integers(0, 5), width=st.integers(1, 4), piece=st.integers(1, 40))
def test_any_whitespace_any_chunk(tmp_path_factory, data, rows, width, piece):
    numbers = data.draw(st.lists(NUMBERS, min_size=rows * width, max_size=rows * width))
    words = [str(rows), *(data.draw(FORMATS).format(number) for number in numbers)]
    text = data.draw(st.sampled_from(["", " ", "\n\n"])) + "".join(word + data.draw(WHITE) for word in words)
    path = tmp_path_factory.mktemp("text") / "input.txt"
    path.write_bytes((text if data.draw(st.booleans()) else text.rstrip()).encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows_text, "CHUNK_BYTES", piece)
        got = read_rows_text(path, width)
    assert got.dtype == np.float32
    assert np.array_equal(got, np.array(numbers, np.float32).reshape(rows, width))


def test_numbers_as_c_writes_them(path):
    path.write_text("+2\n1. .5 -3\n1e-3 +4E2 0x\n".replace("0x", "00012"))
    assert read_rows_text(path, 3).tolist() == np.float32([[1, 0.5, -3], [1e-3, 400, 12]]).tolist()


@pytest.mark.parametrize("piece", [8, 1 << 20])
@pytest.mark.parametrize(
    ("text", "what", "got", "expected"),
    [
        ("", "the file is empty", "no text", "3 values per row"),
        (" \n\n ", "the file is empty", "no text", "3 values per row"),
        ("\nrows\n1 2 3\n", "line 2: bad number of rows", "'rows'", "an integer"),
        ("1.0\n1 2 3\n", "line 1: bad number of rows", "'1.0'", "an integer"),
        ("-1\n1 2 3\n", "line 1: bad number of rows", "'-1'", "an integer"),
        ("9999999999999999999\n1 2 3\n", "line 1: bad number of rows", "'9999999999999999999'", "an integer"),
        ("2\n1 2 3\n4 five 6\n", "line 3: not a number", "'five'", "finite float32"),
        ("2\n1 2 3\n4 5.0f 6\n", "line 3: not a number", "'5.0f'", "finite float32"),
        ("2\n1 2 3\n4 1_0 6\n", "line 3: not a number", "'1_0'", "finite float32"),
        ("2\n1,2,3\n4,5,6\n", "line 2: not a number", "'1,2,3'", "finite float32"),
        ("2\n1 2 nan\n4 5 6\n", "line 2: not a number", "'nan'", "finite float32"),
        ("2\n\n\n1 2 3\n4 5 -inf\n", "line 5: not a number", "'-inf'", "finite float32"),
        ("1\n1 2 1e39\n", "line 2: not a number", "'1e39'", "finite float32"),
        ("1\n1 2 1e999\n", "line 2: not a number", "'1e999'", "finite float32"),
        ("1\n1 2 \xff\n", "line 2: not a number", r"\xff", "finite float32"),
        ("2\n1 2 3\n4 5\n", "the file ends in line 4", "5 values", "6: 2 rows of 3"),
        ("2\n1 2 3\n4 5", "the file ends in line 3", "5 values", "6: 2 rows of 3"),
        ("3", "the file ends in line 1", "0 values", "9: 3 rows of 3"),
        ("999999999999999999\n1 2 3", "the file ends in line 2", "3 values", "rows of 3"),
        ("1\n1 2 3\n4\n", "line 3 has text after", "more values", "3: 1 rows of 3"),
        ("1\n1 2 3 4", "line 2 has text after", "more values", "3: 1 rows of 3"),
        ("0\n7", "line 2 has text after", "more values", "0: 0 rows of 3"),
        ("1\n" + "1" * 5000, "line 2: not a number", "1111", "finite float32"),
    ],
)
def test_what_is_wrong_is_named_by_its_line(path, monkeypatch, piece, text, what, got, expected):
    monkeypatch.setattr(rows_text, "CHUNK_BYTES", piece)
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(FormatError) as caught:
        read_rows_text(path, 3)
    assert str(path) in caught.value.what
    assert what in caught.value.what
    assert got in caught.value.got
    assert len(caught.value.got) < 200
    assert expected in caught.value.expected
    assert caught.value.hint


def test_a_file_that_is_not_text(path):
    path.write_bytes(np.random.default_rng(0).bytes(3 << 20))
    with pytest.raises(FormatError, match="line 1: bad number of rows"):
        read_rows_text(path, 3)
    path.write_bytes(b"\0" * (3 << 20))
    with pytest.raises(FormatError, match="line 1: not a number"):
        read_rows_text(path, 3)


# -- writing -----------------------------------------------------------------------------------------------


def printf(rows) -> str:
    """What fprintf("%.4f ") writes; Python's % is C's."""
    return f"{len(rows)}\n" + "".join("".join(f"{float(x):.4f} " for x in row.ravel()) + "\n" for row in rows)


def write(path, rows, pieces=3):
    with TextWriter(path, rows.shape, rows.dtype) as out:
        for piece in np.array_split(rows, pieces):
            out.write(piece)
    return path.read_text()


def test_lines_are_those_of_printf(path):
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, (7, 5, 4, 3)).astype(np.float32)
    x[1].ravel()[:8] = [-1, 1, 0, -0.0, -1e-5, 1e-5, 0.03125, -0.09375]  # halves of a step round to even
    x[2] = np.round(x[2], 4) + np.float32(5e-5)  # as close to a tie as float32 gets
    assert write(path, x) == printf(x)
    assert "-0.0000 0.0000 0.0312 -0.0938 " in path.read_text()


def test_halves_round_to_even(path):
    halves = (2 * np.arange(-8192, 8192) + 1) / np.float32(16384)  # k / 2^14: includes every tie in float32
    x = halves.astype(np.float32).reshape(4, -1)
    assert write(path, x) == printf(x)


def test_numbers_outside(path):
    x = np.random.default_rng(1).standard_normal((6, 2, 3)).astype(np.float32) * 100
    x[0] = 0.5  # one row with values in [-1, 1]
    x[3, 0] = [np.nan, np.inf, -np.inf]
    assert write(path, x) == printf(x)
    assert "nan inf -inf " in path.read_text()
    pixels = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)
    assert write(path, pixels) == printf(pixels)


def test_what_is_written_can_be_read(path):
    x = np.random.default_rng(2).uniform(-1, 1, (9, 10)).astype(np.float32)
    write(path, x)
    assert np.abs(read_rows_text(path, 10) - x).max() <= 5.1e-5


def test_an_empty_text(path):
    assert write(path, np.zeros((0, 3), np.float32)) == "0\n"
    assert read_rows_text(path, 3).shape == (0, 3)


def test_other_rows_are_refused(path):
    def short():
        with TextWriter(path, (4, 3), np.float32) as out:
            out.write(np.zeros((4, 2), np.float32))

    with pytest.raises(ShapeError, match=re.escape("(4, 2)")):
        short()
    assert list(path.parent.iterdir()) == []
