"""digits: handwritten digits by a 784-320-160-10 MLP, trained with plain SGD (batch 64, lr 0.03, 30 epochs)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from onchip.cache import cache_dir
from onchip.errors import FormatError
from onchip.formats.arrays.row_files import open_rows
from onchip.network.build import mlp
from onchip.network.graph import Network
from onchip.network.names import known_name
from onchip.network.recipe import Array
from onchip.train.options import TrainOptions
from onchip.workloads.dataset import Dataset
from onchip.workloads.table_data import BYTE_SCALE, flat, read_rows

HIDDEN = (320, 160)
CLASSES = 10
TRAIN = TrainOptions(loss="cross_entropy", optimiser="sgd", lr=0.03, batch_size=64, epochs=30)
BATCH_SIZE, LR, EPOCHS = TRAIN.batch_size, TRAIN.lr, TRAIN.epochs

_FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
_TEST_ROWS = 360  # of scikit-learn's digits


def network(pixels: int = 784, hidden: Sequence[int] = HIDDEN, seed: int = 0, activation: str = "ReLU") -> Network:
    return mlp(pixels, *hidden, CLASSES, activation=activation, seed=seed, name="digits")


def load_data(name: str = "auto") -> Dataset:
    """ "mnist" (60,000 + 10,000 images 28x28), "sklearn" (1,797 images 8x8), "auto": the first found."""
    name = known_name(name, ("auto", "mnist", "sklearn"), "data set", "--data auto")
    folder = find_mnist()
    if name == "sklearn" or (name == "auto" and folder is None):
        return _sklearn_digits()
    if folder is None:
        raise FormatError("the MNIST files are missing", got="no mnist folder in $ONCHIP_DATA or the cache folder",
                          expected=", ".join(f"{file}[.gz]" for file in _FILES),
                          hint="onchip data mnist, ONCHIP_DATA=the folder of mnist/, or --data sklearn")  # fmt: skip
    return _mnist(folder)


def find_mnist() -> Path | None:
    """The folder with the four MNIST files: $ONCHIP_DATA/mnist, then the user's cache folder."""
    roots = [Path(folder)] if (folder := os.environ.get("ONCHIP_DATA")) else []
    for root in (*roots, cache_dir() / "data"):
        if all(_find(root / "mnist", file) for file in _FILES):
            return root / "mnist"
    return None


def mnist_files(folder: Path) -> tuple[Path, ...]:
    return tuple(_find(folder, stem) or folder / stem for stem in _FILES)


def _find(folder: Path, stem: str) -> Path | None:
    return next((path for path in (folder / stem, folder / f"{stem}.gz") if path.is_file()), None)


def _mnist(folder: Path) -> Dataset:
    images, labels, test_images, test_labels = mnist_files(folder)
    x_train, y_train, note = _images_and_classes(images, labels)
    x_test, y_test, test_note = _images_and_classes(test_images, test_labels)
    notes = tuple(each for each in (note, test_note) if each)
    return Dataset("mnist", str(folder), 28, x_train, y_train, x_test, y_test, notes=notes, scale=BYTE_SCALE)


def _images_and_classes(images: Path, labels: Path) -> tuple[Array, Array, str]:
    x, note = read_rows(images)
    with open_rows(labels) as rows:
        y = rows.read(0, len(rows))
    if x.shape != (len(y), 28, 28) or y.ndim != 1 or len(y) == 0:
        raise FormatError(
            f"{images.name} and {labels.name} in {images.parent} are not MNIST's",
            got=f"images {x.shape}, labels {y.shape}", expected="images (n, 28, 28), labels (n,)",
            hint="--data sklearn, or the original files",
        )  # fmt: skip
    if y.min() < 0 or y.max() >= CLASSES:
        raise FormatError(
            f"{labels.name} in {labels.parent} has labels that are not MNIST's", got=f"{y.min()} to {y.max()}",
            expected=f"0 to {CLASSES - 1}", hint="--data sklearn, or the original files",
        )  # fmt: skip
    return flat(x), y.astype(np.int64), note


def _sklearn_digits() -> Dataset:
    """scikit-learn's digits, in the order of its stratified split: the last 360 are the test rows. See NOTICE."""
    with np.load(Path(__file__).with_name("digits.npz")) as file:
        x, y = file["images"].astype(np.float32) / np.float32(16), file["labels"].astype(np.int64)
    train = len(x) - _TEST_ROWS
    return Dataset("sklearn digits", "bundled with onchip", 8, x[:train], y[:train], x[train:], y[train:])
