"""A cache for files that are slow to read: their content is stored as .npy in the cache folder and memory-mapped later.

An entry is keyed by path, size, modification time and `way`. It is checked against its JSON description: on any
mismatch the file is read again.
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

VERSION = 1  # of the cache entries; part of the file name


@dataclass(frozen=True, eq=False)
class CachedTable:
    """The content of a file: rows, labels if any, and the class names of the labels."""

    x: Array
    y: Array | None = None
    words: tuple[str, ...] = ()

    def arrays(self) -> dict[str, Array]:
        return {"x": self.x} if self.y is None else {"x": self.x, "y": self.y}


def read_cached(path: Path, way: str, read: Callable[[], CachedTable]) -> tuple[CachedTable, str]:
    """Return `read()`, memory-mapped from the cache if possible, and a message for the user, or "".

    way  names how `read` parses the file: part of the key
    """
    source = path.absolute()
    try:
        status = source.stat()
    except OSError:
        return read(), ""  # raises the error
    folder = private_folder("tables")
    entry = _digest(str(source), way)
    stem = f"{entry}-{_digest(VERSION, status.st_size, status.st_mtime_ns)}"
    if folder and (kept := _find(folder, stem)) is not None:
        return kept, ""
    started = time.perf_counter()
    content = read()
    note = f"{path.name}: read {len(content.x):,} rows in {time.perf_counter() - started:.1f} s"
    if folder is None:  # private_folder has logged the reason
        return content, f"{note}; not cached"
    try:
        _keep(folder, stem, content)
    except OutputError as error:
        _remove(folder.glob(f"{stem}*"))  # a partial entry is useless, and the disk may be full
        return content, f"{note}; not cached: {folder}: {error.got}"
    # Remove entries of earlier versions of the file.
    _remove(old for old in folder.glob(f"{entry}-*") if not old.name.startswith(stem))
    return _find(folder, stem) or content, f"{note}; cached"


def _remove(paths: Iterable[Path]) -> None:
    for path in paths:
        with contextlib.suppress(OSError):
            path.unlink()


def _digest(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:20]


def _description(kept: CachedTable) -> dict[str, Any]:
    arrays = {name: [array.dtype.str, list(array.shape)] for name, array in kept.arrays().items()}
    return {"arrays": arrays, "words": list(kept.words)}


def _find(folder: Path, stem: str) -> CachedTable | None:
    try:
        description = json.loads((folder / f"{stem}.json").read_bytes())
        x = map_npy(folder / f"{stem}-x.npy")
        y = map_npy(folder / f"{stem}-y.npy") if "y" in description["arrays"] else None
        kept = CachedTable(x, y, tuple(map(str, description["words"])))
        return kept if _description(kept) == description else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):  # FormatError is a ValueError
        return None


def _keep(folder: Path, stem: str, content: CachedTable) -> None:
    for name, array in content.arrays().items():
        with NpyWriter(folder / f"{stem}-{name}.npy", array.shape, array.dtype) as file:
            file.write(array)
    with atomic_write(folder / f"{stem}.json") as text:  # written last: marks the entry as complete
        text.write(json.dumps(_description(content)).encode())
