"""digits: handwritten digits by a 784-320-160-10 MLP, trained with plain SGD (batch 64, lr 0.03, 30 epochs)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from onchip.errors import FormatError, InputError
from onchip.files import cache_dir
from onchip.spec.arrays import open_rows
from onchip.spec.build import mlp
from onchip.spec.network import Network
from onchip.spec.recipe import Array

HIDDEN = (320, 160)
CLASSES = 10
BATCH_SIZE, LR, EPOCHS = 64, 0.03, 30

_FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


@dataclass(frozen=True, eq=False)
class Dataset:
    """Rows of pixels between 0 and 1 with their classes."""

    name: str
    where: str
    side: int  # an image is side x side pixels
    x_train: Array  # (n, side * side) float32
    y_train: Array  # (n,) int64
    x_test: Array
    y_test: Array


def network(pixels: int = 784, hidden: Sequence[int] = HIDDEN, seed: int = 0) -> Network:
    return mlp(pixels, *hidden, CLASSES, seed=seed, name="digits")


def load_data(name: str = "auto") -> Dataset:
    """ "mnist" (60,000 + 10,000 images 28x28), "sklearn" (1,797 images 8x8, always there), "auto": the first found."""
    if name not in ("auto", "mnist", "sklearn"):
        raise InputError("unknown data set", got=name, expected="auto, mnist or sklearn", hint="--data auto")
    folder = find_mnist()
    if name == "sklearn" or (name == "auto" and folder is None):
        return _sklearn_digits()
    if folder is None:
        raise FormatError("the MNIST files are not here", got="no mnist folder in $ONCHIP_DATA or the cache folder",
                          expected=", ".join(f"{file}[.gz]" for file in _FILES),
                          hint="set ONCHIP_DATA to the folder that holds mnist/, or use --data sklearn")  # fmt: skip
    return _mnist(folder)


def find_mnist() -> Path | None:
    """The folder with the four MNIST files: $ONCHIP_DATA/mnist, then the user's cache folder."""
    roots = [Path(given)] if (given := os.environ.get("ONCHIP_DATA")) else []
    for root in (*roots, cache_dir() / "data"):
        if all(_find(root / "mnist", file) for file in _FILES):
            return root / "mnist"
    return None


def _find(folder: Path, stem: str) -> Path | None:
    return next((path for path in (folder / stem, folder / f"{stem}.gz") if path.is_file()), None)


def _mnist(folder: Path) -> Dataset:
    arrays = []
    for stem in _FILES:
        path = _find(folder, stem)
        assert path is not None
        with open_rows(path) as rows:
            arrays.append(rows.read(0, len(rows)))
    images, labels, test_images, test_labels = arrays
    for part, pixels, classes in (("train", images, labels), ("t10k", test_images, test_labels)):
        if pixels.shape != (len(classes), 28, 28) or classes.ndim != 1 or len(classes) == 0:
            raise FormatError(
                f"the {part} files in {folder} are not MNIST's", got=f"images {pixels.shape}, labels {classes.shape}",
                expected="images (n, 28, 28), labels (n,)", hint="--data sklearn, or the original files",
            )  # fmt: skip
    return Dataset("mnist", str(folder), 28, _pixels(images, 255), labels.astype(np.int64),
                   _pixels(test_images, 255), test_labels.astype(np.int64))  # fmt: skip


def _sklearn_digits() -> Dataset:
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, labels = load_digits(return_X_y=True)
    x_train, x_test, y_train, y_test = train_test_split(
        _pixels(images, 16), labels.astype(np.int64), test_size=360, random_state=0, stratify=labels
    )
    return Dataset("sklearn digits", "bundled with scikit-learn", 8, x_train, y_train, x_test, y_test)


def _pixels(images: Array, white: int) -> Array:
    return images.reshape(len(images), -1).astype(np.float32) / np.float32(white)
