"""Pictures to train on: from a folder of .png and .jpg files, or from one file of arrays (.npz, .npy, idx)."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from onchip.errors import FormatError, MissingPackageError, ShapeError
from onchip.files import check_memory, open_input
from onchip.formats.arrays.npz import open_npz
from onchip.formats.arrays.row_files import open_rows
from onchip.network.reading import show
from onchip.network.recipe import Array

SUFFIXES = (".png", ".jpg", ".jpeg")
_GRAY_MODES = ("1", "L", "LA")


@dataclass(frozen=True, eq=False)
class Pictures:
    images: Array  # (n, H, W, 1 or 3) uint8
    skipped: tuple[str, ...] = ()  # files that could not be used, each with the reason


def read_pictures(source: Path, skip_bad: bool = False) -> Pictures:
    """The pictures of a folder, also those in folders inside it, by name; or of a file of arrays.

    skip_bad  leave out files that are damaged or of another size than most, in place of a FormatError
    """
    if source.is_dir():
        return _read_folder(source, skip_bad)
    if source.suffix.lower() in SUFFIXES:
        got, expected = "one picture", "a folder of pictures, .npz, .npy or idx"
        raise FormatError(f"{source} is a single picture", got=got, expected=expected, hint=str(source.parent))
    with open_npz(source, "images") if source.suffix.lower() == ".npz" else open_rows(source) as rows:
        shape, dtype = rows.shape, rows.dtype
        is_picture = len(shape) == 3 or (len(shape) == 4 and shape[3] in (1, 3))
        if dtype != np.uint8 or not is_picture or 0 in shape:
            raise ShapeError(
                f"{source} holds no pictures", got=f"{dtype.name} {show(list(shape))}",
                expected="uint8 [n, H, W, 3], [n, H, W, 1] or [n, H, W]", hint="values from 0 to 255, channels last",
            )  # fmt: skip
        return Pictures(rows.read(0, len(rows)).reshape(*shape[:3], -1))


def _read_folder(folder: Path, skip_bad: bool) -> Pictures:
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES and path.is_file())
    if not paths:
        got, expected = "none", f"files that end in {', '.join(SUFFIXES)}"
        raise FormatError(f"no pictures in {folder}", got=got, expected=expected, hint=f"list the folder: ls {folder}")
    skipped: list[tuple[Path, FormatError]] = []
    headers = dict(_each(paths, _header, skipped, skip_bad))
    if not headers:
        raise skipped[0][1]
    size, count = Counter(header[:2] for header in headers.values()).most_common(1)[0]
    channels = 1 if all(is_gray for _, _, is_gray in headers.values()) else 3
    check_memory(len(headers) * size[0] * size[1] * channels, "the pictures")

    def read(path: Path) -> Array:
        width, height, _ = headers[path]
        if (width, height) != size:
            expected = f"{size[0]} x {size[1]} pixels, as {count:,} of {len(headers):,}"
            got, hint = f"{width} x {height} pixels", "resize it, or leave such files out: --skip-bad"
            raise FormatError(f"{path} has another size", got=got, expected=expected, hint=hint)
        return _pixels(path, channels)

    images = [image for _, image in _each(list(headers), read, skipped, skip_bad)]
    if not images:
        raise skipped[0][1]
    reasons = tuple(f"{path.relative_to(folder)}: {error.got}" for path, error in skipped)
    return Pictures(np.stack(images), reasons)


def _each(
    paths: list[Path], read: Any, skipped: list[tuple[Path, FormatError]], skip_bad: bool
) -> Iterator[tuple[Path, Any]]:
    """What `read` returns for every file; with skip_bad, those that it refuses are added to `skipped`."""
    for path in paths:
        try:
            yield path, read(path)
        except FormatError as error:
            if not skip_bad:
                raise
            skipped.append((path, error))


def _header(path: Path) -> tuple[int, int, bool]:
    """Width, height, and whether it is gray."""
    with _opened(path) as picture:
        return picture.width, picture.height, picture.mode in _GRAY_MODES


def _pixels(path: Path, channels: int) -> Array:
    with _opened(path) as picture:
        pixels = np.asarray(picture.convert("L" if channels == 1 else "RGB"))
        return pixels.reshape(*pixels.shape[:2], channels)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """A picture of Pillow's; whatever its decoders raise is a FormatError with the name of the file."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise MissingPackageError("reading .png and .jpg files", "Pillow", "pictures") from None
    with open_input(path) as file:
        try:
            yield Image.open(file)
        except Exception as error:
            got = "no known format" if isinstance(error, UnidentifiedImageError) else str(error)
            hint = "copy or download it again, or leave such files out: --skip-bad"
            raise FormatError(
                f"{path} cannot be read as a picture", got=got, expected="a whole .png or .jpg", hint=hint
            ) from None
