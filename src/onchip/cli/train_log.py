"""--log: the options, then one line per epoch, each a JSON object, each written as soon as it is known.

A reader always finds complete lines, however the run ended. The log of an earlier run is kept until the new training
starts; then a new file with its first line replaces it atomically.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from onchip.cli.output import json_value
from onchip.files import atomic_write, write_error

if TYPE_CHECKING:
    from onchip.train.training_run import Epoch


def log_head(requested: Mapping[str, Any]) -> dict[str, Any]:
    """The first line: the options and the versions."""
    import numpy

    from onchip import __version__

    versions = {"onchip": __version__, "numpy": numpy.__version__, "python": platform.python_version()}
    return {"versions": versions, **requested}


class TrainLog:
    """Creates the file when the training starts: a run that fails earlier keeps the old log. No path: no log."""

    def __init__(self, path: Path | None, head: Mapping[str, Any]) -> None:
        self._path, self._head = path, head
        self._fd: int | None = None

    def begin(self) -> None:
        if self._path is not None and self._fd is None:
            with atomic_write(self._path) as file:
                file.write(_line(self._head))
            self._fd = os.open(self._path, os.O_WRONLY | os.O_APPEND)

    def epoch(self, epoch: Epoch) -> None:
        self.begin()
        if self._path is None or self._fd is None:
            return
        line, size_before = _line(asdict(epoch)), os.fstat(self._fd).st_size
        try:
            # In one write: a killed process leaves the whole line or nothing.
            while line:
                line = line[os.write(self._fd, line) :]
        except BaseException as error:  # a full disk may accept part of a line
            os.ftruncate(self._fd, size_before)
            if isinstance(error, OSError):
                raise write_error(self._path, error) from None
            raise

    def __enter__(self) -> TrainLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        if self._fd is not None:
            os.close(self._fd)


def _line(document: Mapping[str, Any]) -> bytes:
    return json.dumps(json_value(document), allow_nan=False).encode() + b"\n"
