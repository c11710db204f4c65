"""The settings of `onchip train`, from the command line, a config file, or defaults.

A config file is a flat TOML table whose keys are the long options with underscores for hyphens, and `model`:

    model = "digits"
    hidden = [320, 160]
    lr = 0.1

The command line overrides the file. Paths in the file are relative to it.
"""

from __future__ import annotations

import re
import typing
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from types import NoneType
from typing import Any

from onchip.errors import FormatError, InputError
from onchip.files import open_input
from onchip.network.reading import blaming, show
from onchip.train.options import MAX_FLOAT32, OTHER_NAMES, TrainOptions, check_name

MAX_CONFIG_BYTES = 1 << 14  # one line per key is short; the parser's time is quadratic in the nesting depth
MAX_SEEDS = 1000
_MAX_DIGITS = 18  # of a width
_MAYBE_FILES = ("model", "data", "labels", "test_data", "test_labels")  # or names


@dataclass(frozen=True)
class Settings:
    """All settings but the training options; None: not given."""

    model: str
    data: str | None = None
    labels: str | None = None
    test_data: str | None = None
    test_labels: str | None = None
    test_share: float | None = None
    hidden: tuple[int, ...] | None = None
    activation: str | None = None
    scale: bool | None = None
    checkpoint: Path | None = None
    checkpoint_every: float | None = None
    resume: bool = False
    debug: bool = False
    seeds: int = 1
    log: Path | None = None
    plot: Path | None = None
    output: Path | None = None
    device: str = "auto"
    threads: int | None = None


def settings(config: Path | None, told: Mapping[str, Any]) -> tuple[Settings, dict[str, Any]]:
    """All settings, and the training options that were given.

    told  from the command line; None: not given
    """
    given = {} if config is None else read_config(config)
    given |= {name: value for name, value in told.items() if value is not None}
    if "model" not in given:
        raise InputError(
            "nothing to train", got="no MODEL", expected="the name of a workload, or a file",
            hint="onchip train digits, or model = 'digits' in the config file",
        )  # fmt: skip
    if given.get("resume") and "checkpoint" not in given:
        got, hint = "--resume alone", "--checkpoint DIR --resume"
        raise InputError("nothing to resume from", got=got, expected="a folder with checkpoints", hint=hint)
    if isinstance(given.get("hidden"), str):
        given["hidden"] = _widths(given["hidden"])
    if given.get("seeds", 1) != 1:
        _check_seeds(given)
    own = {field.name for field in fields(Settings)}
    options = {name: value for name, value in given.items() if name not in own}
    return Settings(**{name: value for name, value in given.items() if name in own}), options


def _check_seeds(given: Mapping[str, Any]) -> None:
    if not 1 <= given["seeds"] <= MAX_SEEDS:
        raise InputError("bad number of seeds", got=str(given["seeds"]), expected=f"1 to {MAX_SEEDS}", hint="--seeds 8")
    for name in ("checkpoint", "resume", "debug", "log", "plot"):
        if given.get(name):
            raise InputError(
                f"--{name} is of one run", got=f"--{name} and --seeds {given['seeds']}", expected="one of them",
                hint="--seed N for a single network",
            )  # fmt: skip


def _widths(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.strip().isdecimal() and len(part.strip()) <= _MAX_DIGITS and int(part) > 0 for part in parts):
        raise InputError(
            "bad hidden widths", got=show(text), expected="whole numbers above 0, with commas", hint="--hidden 320,160"
        )
    return tuple(int(part) for part in parts)


# -- the file ----------------------------------------------------------------------------------------------


def read_config(path: Path) -> dict[str, Any]:
    """The checked keys and values of a config file; InputError with the line of the mistake."""
    import tomllib

    with open_input(path) as file, blaming(path):
        text = file.read(MAX_CONFIG_BYTES + 1)
        if len(text) > MAX_CONFIG_BYTES:
            raise FormatError("too long for a config file", got="more", expected=f"at most {MAX_CONFIG_BYTES:,} B")
        try:
            table = tomllib.loads(text.decode())
        except (ValueError, RecursionError) as error:  # invalid TOML, invalid UTF-8, an int with thousands of digits
            hint = 'keys and values: lr = 0.1, model = "digits"'
            raise FormatError("not TOML", got=str(error), expected="a line a key", hint=hint) from None
        kinds, found = known_keys(), dict[str, Any]()
        for name, value in table.items():
            own = OTHER_NAMES.get(name, name)
            if own in found:
                raise InputError(f"two values of {own}", got=", ".join(table), expected="one", hint=f"{own} alone")
            found[own] = _checked(name, value, kinds, text.decode(), path.parent)
        return found


def known_keys() -> dict[str, type]:
    """Every key with the type of its value."""
    kinds = {}
    for name, hint in typing.get_type_hints(Settings).items():
        kinds[name] = next(kind for kind in (typing.get_args(hint) or (hint,)) if kind is not NoneType)
    return kinds | {field.name: type(field.default) for field in fields(TrainOptions)}


def _checked(name: str, value: Any, kinds: Mapping[str, type], text: str, folder: Path) -> Any:
    lines = [i for i, line in enumerate(text.splitlines(), 1) if re.match(rf"\W*{re.escape(name)}\b", line)]
    where = f"line {lines[0]}: " if lines else ""
    own = OTHER_NAMES.get(name, name)
    try:
        check_name(own, list(kinds), "key")
    except InputError as error:
        hint = error.hint or f"leave {show(name)} out"
        raise InputError(f"{where}{error.what}", got=error.got, expected=error.expected, hint=hint) from None
    kind = kinds[own]
    if isinstance(value, str) and "\0" in value:  # never a valid name, and system calls reject it
        raise InputError(f"{where}bad {name}", got=show(value), expected="text without zero bytes", hint=f"mend {name}")
    if kind is Path and isinstance(value, str):
        return folder / value
    if kind is float and type(value) is int and abs(value) <= MAX_FLOAT32:
        return float(value)
    if name == "hidden" and isinstance(value, list) and all(type(width) is int and width > 0 for width in value):
        return tuple(value)
    if name == "class_weight" and isinstance(value, str | list | dict):
        return value
    if name == "hidden" and isinstance(value, str):
        return _widths(value)
    if type(value) is kind:
        return str(folder / str(value)) if name in _MAYBE_FILES and _is_file(folder / str(value)) else value
    expected = {
        str: 'a word, as "digits"', Path: 'a path, as "out.onnx"', int: "a whole number", float: "a number",
        bool: "true or false", NoneType: 'as "balanced", [1, 5] or {1 = 5}',
    }.get(kind, "whole numbers above 0, as [320, 160]")  # fmt: skip
    raise InputError(f"{where}bad {name}", got=show(value), expected=expected, hint=f"mend {name}")


def _is_file(path: Path) -> bool:
    # A missing path with such a suffix counts as a file too: its reader then reports the path.
    return path.is_file() or path.suffix in (".npy", ".gz", ".csv", ".onnx", ".safetensors")
