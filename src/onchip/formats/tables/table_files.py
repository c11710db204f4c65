"""Which files a table consists of: one, several separated by commas, a pattern such as data/*.csv, or a folder."""

from __future__ import annotations

import glob
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from onchip.errors import FormatError, InputError

CSV = (".csv", ".tsv", ".csv.gz", ".tsv.gz")
ARROW = (".parquet", ".arrow", ".feather")
SUFFIXES = (*CSV, *ARROW)


@dataclass(frozen=True)
class TableFile:
    path: Path
    keys: tuple[tuple[str, str], ...] = ()  # of a partitioned folder: year=2024 is ("year", "2024")
    relative: str = ""  # its path in the folder; "": it was not found in a folder

    @property
    def is_arrow(self) -> bool:
        return _suffix(self.path.name) in ARROW


def is_table(data: str) -> bool:
    """Whether this names tables: by its suffix, as a pattern, a list, or a folder."""
    return bool(_suffix(data)) or (_is_folder(data) and any(_in_folder(Path(data))))


def table_files(data: str | os.PathLike[str]) -> tuple[TableFile, ...]:
    """The files of a table, sorted by name within a folder or pattern; FormatError if there are none."""
    text = os.fspath(data)
    parts = [text] if os.path.exists(text) else [part.strip() for part in text.split(",")]
    files = [file for part in parts for file in _files_of(part)]
    if len(files) > 1:  # keys of a single file would be columns that do not vary
        files = [file if file.relative else replace(file, keys=_keys(file.path.parts[:-1])) for file in files]
    if len({file.is_arrow for file in files}) > 1:
        names = sorted({_suffix(file.path.name) for file in files})
        expected, hint = "one kind of table", "a pattern: 'data/*.parquet'"
        raise InputError(f"{text}: tables of different kinds", got=", ".join(names), expected=expected, hint=hint)
    return tuple(files)


def _files_of(part: str) -> Sequence[TableFile]:
    if _is_folder(part):
        if not (found := _in_folder(Path(part))):
            hint = "the folder of the tables, or a pattern: 'data/*.csv'"
            raise FormatError(
                f"no table in {part}", got="a folder without tables", expected=", ".join(SUFFIXES), hint=hint
            )
        return found
    if glob.has_magic(part) and not os.path.exists(part):
        names = sorted(name for name in glob.glob(part, recursive=True) if _suffix(name))
        if not names:
            hint = f"list the folder: ls {Path(part).parent}"
            raise FormatError(f"no file matches {part}", got="none", expected="tables", hint=hint)
        return [TableFile(Path(name)) for name in names]
    return [TableFile(Path(part))]


def _is_folder(data: str) -> bool:
    return os.path.isdir(data)


def _in_folder(folder: Path) -> list[TableFile]:
    """The tables in a folder and its subfolders; hidden files and folders, and those named _*, are skipped."""
    found = []
    for path in sorted(folder.rglob("*")):
        parts = path.relative_to(folder).parts
        if _suffix(path.name) and path.is_file() and not any(part.startswith((".", "_")) for part in parts):
            found.append(TableFile(path, _keys(parts[:-1]), "/".join(parts)))
    return found


def _keys(folders: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Of folders such as year=2024: names and values."""
    pairs = [folder.partition("=") for folder in folders]
    return tuple((name, value) for name, equals, value in pairs if name and equals)


def _suffix(name: str) -> str:
    """ ".csv", ".csv.gz", ...; "" if it is none of a table."""
    return next((suffix for suffix in sorted(SUFFIXES, key=len, reverse=True) if name.lower().endswith(suffix)), "")
