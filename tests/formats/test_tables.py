"""Tables as people have them: separators, text, missing values, several files, Parquet; and what is learned of them."""

from __future__ import annotations

import datetime
import gzip

import numpy as np
import pytest

from onchip.errors import FormatError, InputError
from onchip.formats.tables.csv_rows import read_csv
from onchip.formats.tables.encoding import encode, learn_columns, raw_frame
from onchip.formats.tables.raw_table import Wanted, concatenate
from onchip.formats.tables.read_table import read_table
from onchip.formats.tables.table_files import is_table, table_files
from onchip.network.meaning import Column


@pytest.fixture
def write(tmp_path):
    def write(text, name="t.csv"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
        return path

    return write


def learned(raw, missing="error"):
    return learn_columns(raw, np.arange(len(raw.cells)), missing)


# -- cells -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "name"), [
    ("a,b\n1.5,x\n-2,y\n", "t.csv"),
    ("a;b\n1,5;x\n-2;y\n", "t.csv"),
    ("a;b\n1.5;x\n-2;y\n", "t.csv"),
    ("a\tb\n1.5\tx\n-2\ty\n", "t.tsv"),
    ("a,b\r\n1.5,x\r\n-2,y\r\n", "t.csv.gz"),
    ('a,b\n1.5,"x"\n\n-2,"y"\n\n', "t.csv"),
])  # fmt: skip
def test_separators_and_text(write, text, name):
    raw = read_csv(write(text, name), Wanted())
    assert (raw.names, raw.texts) == (("a", "b"), ((), ("x", "y")))
    assert raw.cells.tolist() == [[1.5, 0], [-2, 1]]


@pytest.mark.parametrize("cell", ["", "NA", "n/a", "NaN", "null", "None", "?"])
def test_missing_numbers(write, cell):
    raw = read_csv(write(f"a,b,c\n1,2,u\n{cell},4,v\n5,6,\n"), Wanted())
    assert np.isnan(raw.cells).tolist() == [[False] * 3, [True, False, False], [False, False, True]]
    assert raw.texts == ((), (), ("u", "v"))


def test_text_in_a_later_block_is_text_from_the_first_row_on(write, monkeypatch):
    monkeypatch.setattr("onchip.formats.tables.csv_rows.BLOCK", 2)
    raw = read_csv(write("a,b\n01,1\n2,\n\n3,5\nx,7\n01,9\n"), Wanted())
    assert raw.texts == (("01", "2", "3", "x"), ())
    np.testing.assert_array_equal(raw.cells, [[0, 1], [1, np.nan], [2, 5], [3, 7], [0, 9]])


def test_a_column_that_is_text_elsewhere(write):
    raw = read_csv(write("a,b\n1,2\n3,4\n"), Wanted(text=frozenset("b")))
    assert raw.texts == ((), ("2", "4"))


@pytest.mark.parametrize(("text", "words"), [
    ("a,b\n1,inf\n2,3\n", ["line 2, column 2 (b)", "finite"]),
    ("a;b\n1;2\n3\n4;5\n", ["line 3: wrong number of cells"]),
    ('a,b\n"1",2\n"3"\n', ["line 3: wrong number of cells"]),
])  # fmt: skip
def test_errors_name_the_line(write, text, words):
    with pytest.raises(FormatError) as caught:
        read_csv(write(text), Wanted())
    for word in words:
        assert word in str(caught.value)


def test_a_damaged_gzip_file(write):
    path = write("a,b\n" + "1,2\n" * 1000, "t.csv.gz")
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(FormatError, match="gz is damaged"):
        read_csv(path, Wanted())


def test_dropped_columns_are_not_read(write):
    raw = read_csv(write("id,a,b\nx,1,2\ny,3,4\n"), Wanted("b", drop=("id",)))
    assert (raw.names, raw.cells.tolist(), raw.words) == (("a",), [[1], [3]], ("2", "4"))
    with pytest.raises(InputError, match=r"no column 'idd' to drop(?s:.*)did you mean id"):
        read_csv(write("id,a\nx,1\n"), Wanted(drop=("idd",)))
    with pytest.raises(InputError, match="the label column cannot be dropped"):
        read_csv(write("id,a\nx,1\n"), Wanted("a", drop=("a",)))
    with pytest.raises(FormatError, match="no column is left"):
        read_csv(write("id,a\nx,1\n"), Wanted("a", drop=("id",)))


# -- learning and encoding ---------------------------------------------------------------------------------


def test_one_hot_and_means(write):
    raw = read_csv(write("a,city\n1,Rome\n,Oslo\n5,Rome\n"), Wanted())
    columns, notes = learned(raw, "mean")
    assert columns == (Column("a", (), 3.0), Column("city", ("Oslo", "Rome"), "Rome"))
    assert notes == (
        "a: 1 missing values are replaced by the mean, 3",
        "city: text, one-hot of 2 values: Oslo, Rome",
    )
    assert encode(raw, columns).x.tolist() == [[1, 0, 1], [3, 1, 0], [5, 0, 1]]
    assert learned(raw, "median")[0][0].fill == 3
    new = read_csv(write("city,x,a\nBonn,0,2\n,0,4\nOslo,0,?\n"), Wanted(columns=columns))
    encoded = encode(new, columns)
    assert encoded.x.tolist() == [[2, 0, 0], [4, 0, 1], [3, 1, 0]]
    assert encoded.unknown == {"city": (1, "Bonn")}
    assert "1 rows have a text that no training row had, such as 'Bonn'" in encoded.notes[0]


def test_only_the_given_rows_are_learned_from(write):
    raw = read_csv(write("a,city\n1,Rome\n2,Oslo\n90,Bonn\n"), Wanted())
    columns, _ = learn_columns(raw, np.array([0, 1]), "mean")
    assert columns == (Column("a", (), 1.5), Column("city", ("Oslo", "Rome"), "Rome"))


@pytest.mark.parametrize(("cells", "missing", "words"), [
    (["1", ""], "error", ["column 'a' has missing values", "1 of 2 rows; the first is row 1", "--missing mean"]),
    (["", ""], "mean", ["column 'a' has no values", "--drop a"]),
    (["2024-01-31", "2024-02-01"], "error", ["dates", "'2024-01-31'", "--drop a"]),
    (["31.01.2024 12:30", "1.2.2024 1:00"], "error", ["dates"]),
    (["12:30", "13:45:10"], "error", ["dates or times"]),
    (["1", "2", "3x"], "error", ["column 'a': not a number", "'3x'"]),
    ([f"name {i}" for i in range(65)], "error", ["too many different texts", "65: 'name 0'", "at most 64", "--drop a"]),
])  # fmt: skip
def test_columns_that_cannot_be_learned(write, cells, missing, words):
    raw = read_csv(write("a,b\n" + "".join(f"{cell},1\n" for cell in cells)), Wanted())
    with pytest.raises(InputError) as caught:
        learned(raw, missing)
    for word in [*words, "got:", "expected:", "try:"]:
        assert word in str(caught.value)


def test_a_missing_value_without_a_fill_is_an_error_with_its_line(write):
    columns = (Column("a"), Column("city", ("x", "y")))
    for text, where in (("a,city\n1,x\n,y\n", "line 3, column 1"), ("a,city\n1,x\n2,\n", "line 3, column 2")):
        with pytest.raises(FormatError, match=where):
            read_csv(write(text), Wanted(columns=columns))


def test_text_where_training_had_numbers(write):
    with pytest.raises(FormatError, match=r"line 2, column 1 \(a\): not a number"):
        read_csv(write("a\nx\n"), Wanted(columns=(Column("a", fill=1.0),)))


def test_a_data_frame():
    pandas = pytest.importorskip("pandas")
    columns = (Column("a", (), 7.0), Column("city", ("Oslo", "Rome"), "Rome"))
    frame = pandas.DataFrame({"city": ["Oslo", None, "Bonn"], "id": [1, 2, 3], "a": [1, 2.5, None]})
    encoded = encode(raw_frame(frame, columns), columns)
    assert encoded.x.tolist() == [[1, 1, 0], [2.5, 0, 1], [7, 0, 0]]
    assert encoded.unknown == {"city": (1, "Bonn")}
    with pytest.raises(InputError, match="column 'a' is not numeric"):
        raw_frame(pandas.DataFrame({"a": ["x"], "city": ["Oslo"]}), columns)


# -- files -------------------------------------------------------------------------------------------------


def test_several_files(write, tmp_path):
    for name in ("b.csv", "a.csv", "sub/c.csv", ".hidden.csv", "_skipped/d.csv", "notes.txt"):
        write("x,y\n1,2\n", name)

    def names(data):
        return [str(file.path.relative_to(tmp_path)) for file in table_files(data)]

    assert names(tmp_path) == ["a.csv", "b.csv", "sub/c.csv"]
    assert names(tmp_path / "*.csv") == ["a.csv", "b.csv"]
    assert names(f"{tmp_path}/b.csv, {tmp_path}/a.csv") == ["b.csv", "a.csv"]
    assert is_table(str(tmp_path))
    assert not is_table(str(tmp_path / "notes.txt"))
    with pytest.raises(FormatError, match="no file matches"):
        table_files(tmp_path / "*.parquet")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FormatError, match="no table in"):
        table_files(tmp_path / "empty")
    write("", "sub/d.parquet")
    with pytest.raises(InputError, match="tables of different kinds"):
        table_files(tmp_path)


def test_a_name_with_a_comma_is_a_file(write):
    assert [file.path.name for file in table_files(write("x,y\n", "a,b.csv"))] == ["a,b.csv"]


def test_keys_of_folders_are_columns(write, tmp_path):
    for year, kind in ((2023, "x"), (2024, "y")):
        write("a,b\n1,2\n", f"year={year}/kind={kind}/t.csv")
    files = table_files(tmp_path)
    assert [file.keys for file in files] == [(("year", str(y)), ("kind", k)) for y, k in ((2023, "x"), (2024, "y"))]
    raw = concatenate([read_table(file, Wanted("b")) for file in files])
    assert (raw.names, raw.texts) == (("a", "year", "kind"), ((), (), ("x", "y")))
    assert raw.cells.tolist() == [[1, 2023, 0], [1, 2024, 1]]
    columns = (Column("kind", ("x", "y")), Column("a"))
    assert read_table(files[1], Wanted(columns=columns)).cells.tolist() == [[0, 1]]
    assert read_table(files[0], Wanted(drop=("year", "kind"))).names == ("a", "b")


def test_texts_of_several_files_are_numbered_together(write):
    first, second = (read_csv(write(f"a,l\n{a},p\n{b},{c}\n"), Wanted("l")) for a, b, c in ("xyp", "yzq"))
    both = concatenate([first, second])
    assert both.texts == (("x", "y", "z"),)
    assert both.cells.ravel().tolist() == [0, 1, 1, 2]
    assert [both.words[i] for i in both.labels] == ["p", "p", "p", "q"]


# -- Parquet and Arrow -------------------------------------------------------------------------------------


@pytest.fixture
def arrow(tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.feather as feather
    import pyarrow.parquet as pq

    def save(columns, name):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith(".parquet"):
            pq.write_table(pa.table(columns), path, row_group_size=2)
        else:
            feather.write_feather(pa.table(columns), str(path), chunksize=2, compression="uncompressed")
        return table_files(path)[0]

    return save


@pytest.mark.parametrize("name", ["t.parquet", "t.feather", "t.arrow"])
def test_types_of_arrow_columns(arrow, name):
    pa = pytest.importorskip("pyarrow")
    from decimal import Decimal

    file = arrow({
        "i": pa.array([1, None, 3], pa.int64()), "f": [0.5, float("nan"), 2], "b": [True, False, None],
        "d": [Decimal("1.25"), None, Decimal("2.5")], "s": ["x", " ", "y"],
        "e": pa.array(["p", "q", "p"]).dictionary_encode(), "label": ["no", "yes", "no"],
    }, name)  # fmt: skip
    raw = read_table(file, Wanted("label", drop=("f",)))
    assert raw.names == ("i", "b", "d", "s", "e")
    np.testing.assert_array_equal(
        raw.cells, [[1, 1, 1.25, 0, 0], [np.nan, 0, np.nan, np.nan, 1], [3, np.nan, 2.5, 1, 0]]
    )
    assert raw.texts == ((), (), (), ("x", "y"), ("p", "q"))
    assert [raw.words[i] for i in raw.labels] == ["no", "yes", "no"]
    assert np.isnan(read_table(file, Wanted()).cells[1, 1])  # column f
    with pytest.raises(FormatError, match="'i' has missing values"):
        read_table(file, Wanted("i", words=False))


@pytest.mark.parametrize(("values", "wanted", "words"), [
    ([datetime.date(2024, 1, 1)], Wanted(), ["column 'a' holds dates", "--drop a"]),
    ([datetime.datetime(2024, 1, 1)], Wanted(), ["column 'a' holds dates or times"]),
    ([[1, 2]], Wanted(), ["column 'a' holds list", "--drop a"]),
    ([1e39], Wanted(), ["row 0, column 'a': not finite"]),
    ([float("nan")], Wanted(columns=(Column("a"),)), ["row 0, column 'a': not a number"]),
    ([None], Wanted(columns=(Column("a"),)), ["column 'a' has missing values"]),
    (["x"], Wanted(columns=(Column("a"),)), ["column 'a' is text", "'x'"]),
    ([1], Wanted(columns=(Column("b"),)), ["no column 'b'"]),
    ([1], Wanted("c"), ["no column has this name", "first, last, or one of: a"]),
    (["x"], Wanted("a", words=False), ["label column 'a' is not numeric"]),
])  # fmt: skip
def test_arrow_columns_that_are_refused(arrow, values, wanted, words):
    file = arrow({"a": values, **({"z": [1]} if wanted.label == "a" else {})}, "t.parquet")
    with pytest.raises(InputError) as caught:
        read_table(file, wanted)
    for word in [*words, "got:", "expected:"]:
        assert word in str(caught.value)


@pytest.mark.parametrize("name", ["t.parquet", "t.arrow"])
@pytest.mark.parametrize("data", [b"", b"PAR1", b"PAR1" + bytes(100) + b"PAR1", b"ARROW1\0\0" + bytes(50)])
def test_damaged_arrow_files(tmp_path, name, data):
    pytest.importorskip("pyarrow")
    (tmp_path / name).write_bytes(data)
    with pytest.raises(FormatError, match=rf"{name}(?s:.*)got:"):
        read_table(table_files(tmp_path / name)[0], Wanted())


def test_without_pyarrow_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    (tmp_path / "t.parquet").write_bytes(b"PAR1")
    with pytest.raises(InputError, match=r"onchip\[parquet\]"):
        read_table(table_files(tmp_path / "t.parquet")[0], Wanted())
