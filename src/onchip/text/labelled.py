"""Labelled texts for training: tables, folders with a file or folder per class, and the files of MR and SST-2."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from onchip.errors import FormatError, InputError
from onchip.files import open_input
from onchip.network.reading import naming_file, show
from onchip.text.records import DELIMITERS, Record, RecordLayout, record_error, record_layout

SKIP_BAD = "--skip-bad"
_SETS = (".train", ".dev", ".test")  # suffixes of files whose lines begin with the label, as SST-2's
_NO_DATA = re.compile(r"readme|licen[cs]e", re.IGNORECASE)  # in the folder of a data set, but not of it
_NAMES = {"pos": "positive", "neg": "negative"}  # of classes, as files abbreviate them
_SST2 = {"0": "negative", "1": "positive"}


@dataclass
class LabelledTexts:
    """Texts with the names of their classes. Bad lines are counted if they are skipped."""

    texts: list[str] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    skipped: int = 0
    first_skipped: str = ""

    def add(self, path: Path, record: Record, label: str, text: str, skip_bad: bool) -> None:
        """Add a text, or count it if it has a problem; unless skip_bad, that is an error."""
        problem = record.problem
        if problem is None and not text.strip():
            problem = "no text", "an empty text", "a sentence"
        if problem is None and not label:
            problem = "no label", show(text), "the name of a class"
        if problem is None:
            self.texts.append(text)
            self.labels.append(label)
        elif skip_bad:
            self.skipped += 1
            self.first_skipped = self.first_skipped or f"{path}, line {record.line}: {problem[0]}"
        else:
            raise record_error(record._replace(problem=problem), SKIP_BAD)


def read_labelled(
    path: Path, column: str | None = None, label: str | None = None, skip_bad: bool = False
) -> LabelledTexts:
    """Read a .csv or .tsv, a file whose lines begin with the label, or a folder with a file or folder per class.

    column, label  of a table: names in its header; default: "text" and "label"
    skip_bad       count lines that are empty, not UTF-8 or too long; else the first is a FormatError with its line
    """
    found = LabelledTexts()
    if path.suffix.lower() in DELIMITERS:
        _read(found, record_layout(path, (column, label or "label")), "", skip_bad)
        return found
    if column is not None or label is not None:
        got = f"--column {column}" if column is not None else f"--labels {label}"
        raise InputError(f"{path} has no columns", got=got, expected="a .csv or .tsv", hint="leave it out")
    if path.is_dir():
        for name, file in _class_files(path):
            _read(found, record_layout(file), name, skip_bad)
        return found
    if path.suffix.lower() in _SETS:
        _read(found, record_layout(path), "", skip_bad)
        return found
    with open_input(path):
        pass
    raise InputError(
        f"{path} has no labels", got=f"a file '{path.name}'", hint="--data FOLDER",
        expected="a .csv or .tsv with a column of labels, a folder with a file or folder per class, or a .train file "
        "whose lines begin with the label",
    )  # fmt: skip


def find_sets(folder: Path) -> dict[str, Path]:
    """The files .train, .dev and .test of a folder, by suffix; empty unless there is one .train."""
    if not folder.is_dir():
        return {}
    files = [path for path in sorted(folder.iterdir()) if path.is_file() and path.suffix.lower() in _SETS]
    sets = {path.suffix.lower()[1:]: path for path in files}
    return sets if "train" in sets and len(sets) == len(files) else {}


def _read(found: LabelledTexts, layout: RecordLayout, label: str, skip_bad: bool) -> None:
    """Add the records of a file, all of one class, or with a label each."""
    path, is_sst2 = layout.path, layout.path.name.startswith("stsa.binary.")
    with open_input(path) as file, naming_file(path):
        for record in layout.records(file):
            own, text = label, record.cells[0] if record.cells else ""
            if layout.delimiter and record.cells:
                own = record.cells[1].strip()
            elif not label:
                own, _, text = text.strip().partition(" ")
                own = _SST2.get(own, own) if is_sst2 else own
            found.add(path, record, own, text, skip_bad)


def _class_files(folder: Path) -> Iterator[tuple[str, Path]]:
    """The files of a folder with their classes: of each file, or of its folder."""
    entries = [path for path in sorted(folder.iterdir()) if path.name[0] != "." and not _NO_DATA.match(path.name)]
    folders = [path for path in entries if path.is_dir()]
    files = [path for path in entries if path.is_file()]
    if folders and files:
        got = f"{folders[0].name}/ and {files[0].name}"
        raise InputError(f"{folder} has files and folders", got=got, expected="a file per class, or a folder per class")
    named = [(_class_of(path), path) for path in files]
    named += [(_NAMES.get(each.name, each.name), path) for each in folders for path in sorted(each.iterdir())]
    if not named:
        raise FormatError(f"{folder} is empty", got="no files", expected="a file or folder per class")
    yield from named


def _class_of(path: Path) -> str:
    """rt-polarity.pos: positive; sports.txt: sports."""
    suffix = path.suffix.lower()[1:]
    name = path.stem if suffix in ("", "txt") else suffix
    return _NAMES.get(name, name)
