"""Data sets from files: every format, labels of every kind, test rows, and mismatches."""

from __future__ import annotations

import gzip

import numpy as np
import pytest

from onchip.errors import FormatError, InputError
from onchip.workloads.table_data import Source, load_table


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("ONCHIP_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def idx(array) -> bytes:
    code = {"uint8": 0x08, "float32": 0x0D}[array.dtype.name]
    sizes = b"".join(int(n).to_bytes(4, "big") for n in array.shape)
    return bytes([0, 0, code, array.ndim]) + sizes + array.astype(array.dtype.newbyteorder(">")).tobytes()


def table(data="t.csv", labels="last", classes=True, seed=0, **source):
    return load_table(Source(data, labels, **source), classes, seed)


# -- formats -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["npy", "fortran npy", "big-endian npy", "idx", "gz", "csv"])
@pytest.mark.parametrize("dtype", ["float32", "uint8"])
def test_rows_of_every_format(folder, form, dtype):
    rng = np.random.default_rng(0)
    array = rng.integers(0, 256, (7, 5)).astype(dtype)
    y = np.array([0, 2, 1, 2, 0, 1, 1], np.uint8)
    name = {"idx": "rows-idx2", "gz": "rows.gz", "csv": "rows.csv"}.get(form, "rows.npy")
    if name.endswith("npy"):
        order = array.astype(array.dtype.newbyteorder(">")) if "big" in form else array
        np.save(folder / name, np.asfortranarray(order) if "fortran" in form else order)
    elif name.endswith("csv"):
        np.savetxt(folder / name, array, fmt="%d", delimiter=",")
    else:
        (folder / name).write_bytes(gzip.compress(idx(array)) if form == "gz" else idx(array))
    np.save(folder / "y.npy", y)
    is_pixels = dtype == "uint8" and form != "csv"
    for _ in range(2):  # the second time from the cache
        data = table(name, "y.npy", test_share=None)
        np.testing.assert_array_equal(data.x_train, array.astype("f4") / np.float32(255 if is_pixels else 1))
        assert data.x_train.dtype == np.float32
        assert data.x_train.flags.c_contiguous
        assert data.y_train.dtype == np.int64
        assert data.y_train.tolist() == y.tolist()
        assert (data.inputs, data.outputs, data.words, len(data.x_test)) == (5, 3, (), 0)


def test_images_become_rows(folder):
    (folder / "images.gz").write_bytes(gzip.compress(idx(np.full((3, 4, 5), 51, np.uint8))))
    np.save(folder / "y.npy", np.array([0, 1, 1]))
    data = table("images.gz", "y.npy")
    assert data.x_train.shape == (3, 20)
    np.testing.assert_array_equal(data.x_train, np.float32(0.2))
    assert any("images.gz: read 3 rows" in note for note in data.notes)
    assert not any("read" in note for note in table("images.gz", "y.npy").notes)


# -- labels ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("labels", "classes", "words"), [
    ("b a c a", [1, 0, 2, 0], ("a", "b", "c")),
    ("3 0 1.0 3", [3, 0, 1, 3], ()),
    ("-1 1 +1 -1", [0, 1, 1, 0], ("-1", "1")),
    ("10 9 x 9", [0, 1, 2, 1], ("10", "9", "x")),
])  # fmt: skip
def test_classes_of_a_column(folder, labels, classes, words):
    (folder / "t.csv").write_text("x,y,kind\n" + "".join(f"{i},0,{w}\n" for i, w in enumerate(labels.split())))
    for label in ("last", "kind"):
        data = table(labels=label)
        assert (data.y_train.tolist(), data.words) == (classes, words)
        assert data.outputs == max(classes) + 1
    assert any("classes:" in note for note in data.notes) == bool(words)


@pytest.mark.parametrize(
    ("y", "classes"), [([2, 0], [2, 0]), ([-1, 1], [0, 1]), ([1.0, 0.0], [1, 0]), ([True, False], [1, 0])]
)
def test_classes_of_a_file(folder, y, classes):
    np.save(folder / "x.npy", np.zeros((2, 3), "f4"))
    np.save(folder / "y.npy", np.array(y).reshape(2, 1))
    assert table("x.npy", "y.npy").y_train.tolist() == classes


def test_numbers(folder):
    (folder / "t.csv").write_text("x,y\n1,2.5\n3,4\n")
    data = table(classes=False)
    assert (data.y_train.tolist(), data.y_train.dtype, data.outputs) == ([[2.5], [4]], np.float32, 1)
    np.save(folder / "x.npy", np.zeros((2, 3)))
    np.save(folder / "y.npy", np.ones((2, 4, 2)))
    data = table("x.npy", "y.npy", classes=False)
    assert (data.y_train.shape, data.outputs) == ((2, 8), 8)


def test_the_same_table_as_classes_and_as_values(folder):
    (folder / "t.csv").write_text("x,y\n1,2\n3,4\n")
    assert table(classes=True).y_train.tolist() == [2, 4]
    assert table(classes=False).y_train.tolist() == [[2], [4]]
    assert table(labels="first").y_train.tolist() == [1, 3]


# -- test rows ---------------------------------------------------------------------------------------------


def test_a_share_of_the_rows_by_the_seed(folder):
    np.save(folder / "x.npy", np.arange(101, dtype="f4").reshape(-1, 1))
    np.save(folder / "y.npy", np.arange(101) % 7)
    data = table("x.npy", "y.npy", test_share=0.2)
    assert (len(data.x_train), len(data.x_test)) == (81, 20)
    x = np.concatenate([data.x_train, data.x_test])[:, 0]
    assert sorted(x.tolist()) == list(range(101))
    assert (np.concatenate([data.y_train, data.y_test]) == x % 7).all()
    assert "test: 20 of 101 rows (20%), chosen by seed 0" in data.notes
    assert table("x.npy", "y.npy", test_share=0.2).x_test.tolist() == data.x_test.tolist()
    assert table("x.npy", "y.npy", test_share=0.2, seed=1).x_test.tolist() != data.x_test.tolist()


def test_a_separate_test_table(folder):
    (folder / "t.csv").write_text("x,y\n1,cat\n2,ant\n3,bee\n")
    (folder / "u.csv").write_text("x,y\n7,bee\n8,ant\n")
    data = table(test_data="u.csv")
    assert (data.y_train.tolist(), data.y_test.tolist()) == ([2, 0, 1], [1, 0])
    assert (data.x_test.tolist(), data.words) == ([[7], [8]], ("ant", "bee", "cat"))
    (folder / "u.csv").write_text("x,y\n7,bee\n8,dog\n")
    with pytest.raises(InputError, match=r"(?s)no training row has.*dog.*ant, bee, cat"):
        table(test_data="u.csv")


def test_numbered_classes_keep_their_meaning(folder):
    (folder / "t.csv").write_text("1,-1\n2,1\n")
    (folder / "u.csv").write_text("7,1\n8,1\n")
    assert table(test_data="u.csv").y_test.tolist() == [1, 1]  # the second class, not class 1 of none
    np.save(folder / "x.npy", np.zeros((2, 1), "f4"))
    np.save(folder / "y.npy", np.array([0, 5]))
    data = table("x.npy", "y.npy", test_data="u.csv", test_labels="last")
    assert (data.y_test.tolist(), data.outputs) == ([1, 1], 6)
    np.save(folder / "z.npy", np.array([0, 7]))
    with pytest.raises(InputError, match=r"(?s)no training row has.*7.*0, 1, 2, 3, 4, 5"):
        table("x.npy", "y.npy", test_data="x.npy", test_labels="z.npy")


def test_rows_and_labels_larger_than_memory(folder, monkeypatch):
    np.save(folder / "x.npy", np.zeros((8, 2), "f4"))
    np.save(folder / "y.npy", np.arange(8))
    for name, count in (("x.npy", 16), ("y.npy", 8)):
        monkeypatch.setattr("onchip.files.free_memory", lambda count=count: 8 * count - 1)
        with pytest.raises(InputError, match=f"{name} does not fit into memory"):
            table("x.npy" if name == "x.npy" else "y.npy", "y.npy")
    monkeypatch.setattr("onchip.files.free_memory", lambda: 8 * 16)
    assert len(table("x.npy", "y.npy").x_train) == 8


def test_names_in_a_file_are_printed_as_text(folder):
    words = ["\x1b[31mred", "a\n\u202eb", "long" * 10_000]
    rows = "".join(f'{i},"{word}"\n' for i, word in enumerate(words * 3))
    (folder / "\x1b[2Jt.csv").write_text("x,y\n" + rows)
    data = table("\x1b[2Jt.csv")
    assert set(data.words) == set(words)  # unchanged
    assert data.name == r"\x1b[2Jt.csv"
    told = data.notes[-1]
    assert told.isprintable()
    assert len(told) < 500
    assert r"\x1b[31mred" in told


# -- errors ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("source", "words"), [
    ({"labels": None}, ["t.csv needs labels", "--labels last"]),
    ({"data": "x.npy", "labels": None}, ["x.npy needs labels", "--labels labels.npy"]),
    ({"labels": "nothing"}, ["no column has this name", "x, y"]),
    ({"labels": "u.csv"}, ["no column has this name"]),
    ({"data": "x.npy", "labels": "u.csv"}, ["labels in a separate table", "--labels last"]),
    ({"data": "x.npy", "labels": "long.npy"}, ["rows and labels do not match", "2 rows, 3 labels"]),
    ({"data": "x.npy", "labels": "matrix.npy"}, ["does not hold classes", "--loss mse"]),
    ({"data": "x.npy", "labels": "half.npy"}, ["not classes", "0.5", "--loss mse"]),
    ({"data": "x.npy", "labels": "huge.npy"}, ["too many classes", "65,536"]),
    ({"data": "x.npy", "labels": "none.npy"}, ["No such file"]),
    ({"data": "none.csv"}, ["No such file"]),
    ({"data": "empty.npy", "labels": "empty.npy"}, ["0 rows"]),
    ({"test_share": 1.0}, ["bad test share"]),
    ({"test_share": -0.1}, ["bad test share"]),
    ({"data": "one.csv", "test_share": 0.9}, ["nothing to train on"]),
    ({"test_labels": "last"}, ["labels without rows", "--test-data"]),
    ({"test_data": "u.csv", "test_share": 0.1}, ["--test-data and --test-share 0.1"]),
    ({"test_data": "x.npy"}, ["x.npy needs labels", "--test-labels"]),
    ({"test_data": "v.csv"}, ["v.csv: no column 'x'", "z, y"]),
    ({"test_data": "x.npy", "test_labels": "pair.npy"}, ["x.npy does not match", "3 columns", "1, as in t.csv"]),
])  # fmt: skip
def test_bad_requests(folder, source, words):
    (folder / "t.csv").write_text("x,y\n1,a\n2,b\n")
    (folder / "u.csv").write_text("x,z,y\n1,2,a\n2,3,b\n")
    (folder / "v.csv").write_text("z,y\n1,a\n2,b\n")
    (folder / "one.csv").write_text("x,y\n1,a\n")
    np.save(folder / "x.npy", np.zeros((2, 3), "f4"))
    labels = {"long": [0, 1, 2], "matrix": [[0, 1], [1, 0]], "half": [0, 0.5], "huge": [0, 70_000], "empty": [],
              "pair": [0, 1]}  # fmt: skip
    for name, y in labels.items():
        np.save(folder / f"{name}.npy", y)
    with pytest.raises((InputError, FormatError)) as caught:
        table(**source)
    for word in [*words, "got:", "expected:"]:
        assert word in str(caught.value)
