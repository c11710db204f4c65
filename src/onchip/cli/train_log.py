"""--log: what was asked, then a line an epoch, each a JSON object, each on the disk as soon as it is known."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any

from onchip.cli.talk import plain
from onchip.files import write_error

if TYPE_CHECKING:
    from onchip.train.course import Epoch


def log_head(asked: Mapping[str, Any]) -> dict[str, Any]:
    """The first line: what was asked, and of whom."""
    import numpy

    from onchip import __version__

    versions = {"onchip": __version__, "numpy": numpy.__version__, "python": platform.python_version()}
    return {"versions": versions, **asked}


class TrainLog:
    """Begins a new file when the training begins: a run that never did leaves the old one alone. No path: no log."""

    def __init__(self, path: Path | None, head: Mapping[str, Any]) -> None:
        self._path, self._head = path, head
        self._file: IO[str] | None = None

    def begin(self) -> None:
        if self._path is not None and self._file is None:
            try:
                self._file = self._path.open("w", encoding="utf-8")
            except OSError as error:
                raise write_error(self._path, error) from None
            self._write(self._head)

    def epoch(self, epoch: Epoch) -> None:
        self.begin()
        self._write(asdict(epoch))

    def _write(self, line: Mapping[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(plain(line), allow_nan=False) + "\n")
            self._file.flush()

    def __enter__(self) -> TrainLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        if self._file is not None:
            self._file.close()
