"""The digits workload: its data is checked before training."""

import gzip

import numpy as np
import pytest

from onchip.errors import FormatError, InputError
from onchip.workloads import digits, load


def write_idx(path, array):
    header = bytes([0, 0, 8, array.ndim]) + b"".join(int(n).to_bytes(4, "big") for n in array.shape)
    path.write_bytes(gzip.compress(header + array.astype(np.uint8).tobytes()))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "mnist").mkdir()
    rng = np.random.default_rng(0)
    for part, n in (("train", 20), ("t10k", 10)):
        write_idx(tmp_path / "mnist" / f"{part}-images-idx3-ubyte.gz", rng.integers(0, 256, (n, 28, 28)))
        write_idx(tmp_path / "mnist" / f"{part}-labels-idx1-ubyte.gz", rng.integers(0, 10, n))
    monkeypatch.setenv("ONCHIP_DATA", str(tmp_path))
    monkeypatch.setenv("ONCHIP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "mnist"


def test_mnist_is_found_read_and_scaled(folder):
    data = digits.load_data()
    assert (data.name, data.x_train.shape, data.y_test.shape) == ("mnist", (20, 784), (10,))
    assert data.x_train.dtype == np.float32
    assert 0 <= data.x_train.min() < data.x_train.max() <= 1
    assert [note.partition(":")[0] for note in data.notes] == [
        "train-images-idx3-ubyte.gz",
        "t10k-images-idx3-ubyte.gz",
    ]
    again = digits.load_data()
    assert again.notes == ()
    np.testing.assert_array_equal(again.x_test, data.x_test)


def test_the_network_and_how_it_is_trained():
    net = digits.network(30, (8, 6), activation="Tanh", seed=3)
    assert [node.name for node in net.nodes] == ["fc1", "tanh1", "fc2", "tanh2", "fc3"]
    assert (net.input.row_size, net.output.row_size) == (30, 10)
    assert (digits.TRAIN.lr, digits.TRAIN.batch_size, digits.TRAIN.epochs) == (0.03, 64, 30)


def test_files_that_do_not_belong_together_are_refused(folder):
    write_idx(folder / "t10k-labels-idx1-ubyte.gz", np.zeros(9))
    with pytest.raises(FormatError, match="t10k-images"):
        digits.load_data("mnist")
    write_idx(folder / "t10k-images-idx3-ubyte.gz", np.zeros((9, 8, 8)))
    with pytest.raises(FormatError, match=r"\(9, 8, 8\)"):
        digits.load_data("mnist")


@pytest.mark.parametrize(("part", "n"), [("train", 20), ("t10k", 10)])
def test_labels_that_are_no_digits_are_refused(folder, part, n):
    write_idx(folder / f"{part}-labels-idx1-ubyte.gz", np.arange(n) % 10 + 191 * (np.arange(n) == 9))
    with pytest.raises(FormatError, match=rf"(?s){part}-labels.*0 to 200.*0 to 9"):
        digits.load_data("mnist")


def test_the_bundled_digits_are_scikit_learns():
    datasets, model_selection = pytest.importorskip("sklearn.datasets"), pytest.importorskip("sklearn.model_selection")
    images, labels = datasets.load_digits(return_X_y=True)
    split = model_selection.train_test_split(images / 16, labels, test_size=360, random_state=0, stratify=labels)
    data = digits.load_data("sklearn")
    for got, expected in zip((data.x_train, data.x_test, data.y_train, data.y_test), split, strict=True):
        np.testing.assert_array_equal(got, expected)


def test_without_mnist(tmp_path, monkeypatch):
    monkeypatch.setenv("ONCHIP_DATA", str(tmp_path))
    monkeypatch.setenv("ONCHIP_CACHE", str(tmp_path))
    assert digits.load_data("auto").name == "sklearn digits"
    with pytest.raises(FormatError, match="MNIST files are missing"):
        digits.load_data("mnist")
    with pytest.raises(InputError, match="unknown data set"):
        digits.load_data("cats")


def test_load_accepts_names_files_and_networks(tmp_path):
    assert load("decode").input.row_size == 72
    net = load("digits")
    assert load(net) is net
    for bad in ("nothing", None, 3):
        with pytest.raises(InputError, match=r"model"):
            load(bad)
