"""A cache for files that are slow to read: their content is stored as .npy in the cache folder and memory-mapped later.

An entry is keyed by paths, sizes, modification times and `way`. It is checked against its JSON description: on any
mismatch the file is read again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onchip.cache import private_folder
from onchip.errors import OutputError
from onchip.files import atomic_write
from onchip.formats.arrays.row_files import NpyWriter, map_npy
from onchip.formats.tables.raw_table import RawTable
from onchip.network.recipe import Array

VERSION = 2  # of the cache entries; part of the file name


@dataclass(frozen=True, eq=False)
class CachedTable:
    """The content of files: rows, labels if any, and the class names of the labels; of a table also its columns."""

    x: Array
    y: Array | None = None
    words: tuple[str, ...] = ()
    # As in RawTable, with its labels as y.
    names: tuple[str, ...] = ()
    texts: tuple[tuple[str, ...], ...] = ()
    label: str = ""
    has_header: bool = True

    @classmethod
    def of(cls, raw: RawTable) -> CachedTable:
        return cls(raw.cells, raw.labels, raw.words, raw.names, raw.texts, raw.label, raw.has_header)

    def raw(self) -> RawTable:
        return RawTable(self.names, self.x, self.texts, self.y, self.words, self.label, self.has_header)

    def arrays(self) -> dict[str, Array]:
        return {"x": self.x} if self.y is None else {"x": self.x, "y": self.y}


def read_cached(paths: Sequence[Path], way: str, read: Callable[[], CachedTable]) -> tuple[CachedTable, str]:
    """Return `read()`, memory-mapped from the cache if possible, and a message for the user, or "".

    way  names how `read` parses the file: part of the key
    """
    sources = [path.absolute() for path in paths]
    try:
        found = [source.stat() for source in sources]
    except OSError:
        return read(), ""  # raises the error
    folder = private_folder("tables")
    entry = _digest(*map(str, sources), way)
    stem = f"{entry}-{_digest(VERSION, *((status.st_size, status.st_mtime_ns) for status in found))}"
    if folder and (kept := _find(folder, stem)) is not None:
        return kept, ""
    started = time.perf_counter()
    content = read()
    name = paths[0].name + ", ..." * (len(paths) > 1)
    note = f"{name}: read {len(content.x):,} rows in {time.perf_counter() - started:.1f} s"
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
    texts = [list(each) for each in kept.texts]
    return {"arrays": arrays, "words": list(kept.words), "names": list(kept.names), "texts": texts,
            "label": kept.label, "has_header": kept.has_header}  # fmt: skip


def _find(folder: Path, stem: str) -> CachedTable | None:
    try:
        description = json.loads((folder / f"{stem}.json").read_bytes())
        x = map_npy(folder / f"{stem}-x.npy")
        y = map_npy(folder / f"{stem}-y.npy") if "y" in description["arrays"] else None
        texts = tuple(tuple(map(str, each)) for each in description["texts"])
        names, words = (tuple(map(str, description[name])) for name in ("names", "words"))
        kept = CachedTable(x, y, words, names, texts, str(description["label"]), bool(description["has_header"]))
        return kept if _description(kept) == description else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):  # FormatError is a ValueError
        return None


def _keep(folder: Path, stem: str, content: CachedTable) -> None:
    for name, array in content.arrays().items():
        with NpyWriter(folder / f"{stem}-{name}.npy", array.shape, array.dtype) as file:
            file.write(array)
    with atomic_write(folder / f"{stem}.json") as text:  # written last: marks the entry as complete
        text.write(json.dumps(_description(content)).encode())
