"""Files that take long to read are read once: what they hold is kept as .npy in the cache folder, and mapped later.

What is kept belongs to a file of this path, size and time of change, read in this way. It is checked against its own
description and never mended: whatever does not fit is read again from the file.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onchip.cache import private_folder
from onchip.errors import OutputError
from onchip.files import atomic_write
from onchip.formats.arrays.row_files import NpyWriter, map_npy
from onchip.network.recipe import Array

VERSION = 1  # of what is kept: another one is another file


@dataclass(frozen=True, eq=False)
class Kept:
    """What a file holds: rows, their labels if it has any, and the words that the labels stand for."""

    x: Array
    y: Array | None = None
    words: tuple[str, ...] = ()

    def arrays(self) -> dict[str, Array]:
        return {"x": self.x} if self.y is None else {"x": self.x, "y": self.y}


def read_once(path: Path, way: str, read: Callable[[], Kept]) -> tuple[Kept, str]:
    """What `read` makes of a file, mapped if it did so before, and what to tell the user, if anything.

    way  in which it is read, should a file be read in several
    """
    source = path.absolute()
    try:
        status = source.stat()
    except OSError:
        return read(), ""  # which says what is wrong
    folder = private_folder("tables")
    entry = _digest(str(source), way)
    stem = f"{entry}-{_digest(VERSION, status.st_size, status.st_mtime_ns)}"
    if folder and (kept := _find(folder, stem)) is not None:
        return kept, ""
    started = time.perf_counter()
    made = read()
    told = f"{path.name}: read {len(made.x):,} rows in {time.perf_counter() - started:.1f} s"
    if folder is None:  # why, is said there
        return made, f"{told}; not kept for next time"
    try:
        _keep(folder, stem, made)
    except OutputError as error:
        _remove(folder.glob(f"{stem}*"))  # what is half kept is of no use, and the disk may be full
        return made, f"{told}; not kept for next time: {folder}: {error.got}"
    # What was kept of the file before it changed.
    _remove(old for old in folder.glob(f"{entry}-*") if not old.name.startswith(stem))
    return _find(folder, stem) or made, f"{told}; kept for next time"


def _remove(paths: Iterable[Path]) -> None:
    for path in paths:
        with contextlib.suppress(OSError):
            path.unlink()


def _digest(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:20]


def _description(kept: Kept) -> dict[str, Any]:
    arrays = {name: [array.dtype.str, list(array.shape)] for name, array in kept.arrays().items()}
    return {"arrays": arrays, "words": list(kept.words)}


def _find(folder: Path, stem: str) -> Kept | None:
    try:
        told = json.loads((folder / f"{stem}.json").read_bytes())
        x = map_npy(folder / f"{stem}-x.npy")
        y = map_npy(folder / f"{stem}-y.npy") if "y" in told["arrays"] else None
        kept = Kept(x, y, tuple(map(str, told["words"])))
        return kept if _description(kept) == told else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):  # FormatError is a ValueError
        return None


def _keep(folder: Path, stem: str, made: Kept) -> None:
    for name, array in made.arrays().items():
        with NpyWriter(folder / f"{stem}-{name}.npy", array.shape, array.dtype) as file:
            file.write(array)
    with atomic_write(folder / f"{stem}.json") as text:  # last: without it there is nothing
        text.write(json.dumps(_description(made)).encode())
