"""What a report is drawn from: result files, profiles, training logs and pictures, by their contents."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from onchip.bench.report.checked import check_epochs, check_profile, check_results
from onchip.bench.report.results import Results, machine_title, parse_results
from onchip.errors import FormatError
from onchip.files import MAX_HEADER_BYTES, open_input

EXPECTED = "a result file, a profile (--json), a training log (.jsonl) or a picture (.png, .jpg)"
# The size in a case: "step, batch 64", "MLP 784-512-256-10, 32 rows", "2^20 numbers".
SIZE = re.compile(r"(?<=batch )\d+|(?:2\^)?\d+(?= (?:row|image|sentence|number|pattern)s?\b)")
_IMAGES = {b"\x89PNG\r\n\x1a\n": "image/png", b"\xff\xd8\xff": "image/jpeg"}
_SUFFIXES = (".json", ".jsonl", ".png", ".jpg", ".jpeg")


@dataclass(frozen=True)
class Log:
    """A training: its options, and its epochs."""

    path: Path
    options: dict[str, Any]
    epochs: tuple[dict[str, Any], ...]


@dataclass(frozen=True)
class Picture:
    path: Path
    kind: str  # "image/png"
    data: bytes


@dataclass
class Sources:
    results: list[tuple[Path, Results]] = field(default_factory=list)
    profiles: list[tuple[Path, dict[str, Any]]] = field(default_factory=list)  # of engines
    logs: list[Log] = field(default_factory=list)
    pictures: list[Picture] = field(default_factory=list)


def read_sources(paths: Sequence[str | os.PathLike[str]]) -> Sources:
    """These files, and those in these folders whose suffix is one of a report's. FormatError for any other content."""
    found = Sources()
    for path in map(Path, paths):
        inside = (
            sorted(each for each in path.rglob("*") if each.suffix.lower() in _SUFFIXES) if path.is_dir() else [path]
        )
        if not inside:
            raise FormatError(f"{path} has nothing to report", got="no file of such a kind", expected=EXPECTED)
        for each in inside:
            _read(each, found)
    return found


def _read(path: Path, found: Sources) -> None:
    with open_input(path) as file:
        raw = file.read(MAX_HEADER_BYTES)
    for magic, kind in _IMAGES.items():
        if raw.startswith(magic):
            found.pictures.append(Picture(path, kind, raw))
            return
    try:
        documents = _documents(raw)
    except (ValueError, RecursionError) as error:
        raise FormatError(
            f"{path} is not for a report", got=f"{type(error).__name__}: {error}", expected=EXPECTED
        ) from None
    first = documents[0]
    if "rows" in first and "machine" in first:
        found.results.append((path, check_results(path, parse_results(first, path))))
    elif "engine" in first or "engines" in first:
        engines = first.get("engines", [first.get("engine")])
        found.profiles += [(path, check_profile(path, each)) for each in _as_list(engines)]
    elif "versions" in first and all("epoch" in each for each in documents[1:]):
        found.logs.append(Log(path, first, check_epochs(path, documents[1:])))
    else:
        raise FormatError(f"{path} is not for a report", got=", ".join(list(first)[:8]) or "{}", expected=EXPECTED)


def _documents(raw: bytes) -> list[dict[str, Any]]:
    """One JSON document, or one per line."""
    text = raw.decode()
    try:
        documents = [json.loads(text)]
    except ValueError:
        documents = [json.loads(line) for line in text.splitlines() if line.strip()]
    if not documents or not all(isinstance(each, dict) for each in documents):
        raise ValueError("no JSON objects")
    return documents


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


# -- in what order -----------------------------------------------------------------------------------------


def by_machine(files: Sequence[Results]) -> dict[str, list[Results]]:
    """The machine with the most rows first."""
    found: dict[str, list[Results]] = {}
    for results in files:
        found.setdefault(machine_title(results.machine), []).append(results)
    rows = {machine: sum(len(results.rows) for results in some) for machine, some in found.items()}
    return {machine: found[machine] for machine in sorted(found, key=lambda machine: -rows[machine])}


def size_of(case: str) -> int:
    """The batch size that a case names; 0 if it names none."""
    found = SIZE.search(case)
    text = found[0] if found else "0"
    return 2 ** int(text[2:]) if text.startswith("2^") else int(text)
