"""The options of `onchip train`, from the command line, a config file, or defaults.

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
from onchip.network.reading import naming_file, show
from onchip.train.options import ALIASES, MAX_FLOAT32, TrainOptions, check_name

MAX_CONFIG_BYTES = 1 << 14  # a config file is short; the parser's time is quadratic in the nesting depth
MAX_SEEDS = 1000
_MAX_DIGITS = 18  # of a width
_MAYBE_FILES = ("model", "data", "labels", "test_data", "test_labels")  # or names


@dataclass(frozen=True)
class Settings:
    """All options but the training options; None: not given."""

    model: str
    data: str | None = None
    labels: str | None = None
    test_data: str | None = None
    test_labels: str | None = None
    test_share: float | None = None
    column: str | None = None
    skip_bad: bool | None = None
    folds: int | None = None
    network: str | None = None
    drop: str | None = None
    missing: str | None = None
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


def settings(config: Path | None, command_line: Mapping[str, Any]) -> tuple[Settings, dict[str, Any]]:
    """All options, the training options separately, without defaults.

    command_line  options by name; None: not given
    """
    chosen = {} if config is None else read_config(config)
    chosen |= {name: value for name, value in command_line.items() if value is not None}
    if "model" not in chosen:
        raise InputError(
            "nothing to train", got="no MODEL", expected="the name of a workload, or a file",
            hint="onchip train digits, or model = 'digits' in the config file",
        )  # fmt: skip
    if chosen.get("resume") and "checkpoint" not in chosen:
        got, hint = "--resume without --checkpoint", "--checkpoint DIR --resume"
        raise InputError("nothing to resume from", got=got, expected="a folder with checkpoints", hint=hint)
    if isinstance(chosen.get("hidden"), str):
        chosen["hidden"] = _widths(chosen["hidden"])
    if chosen.get("seeds", 1) != 1:
        _check_seeds(chosen)
    known = {field.name for field in fields(Settings)}
    options = {name: value for name, value in chosen.items() if name not in known}
    return Settings(**{name: value for name, value in chosen.items() if name in known}), options


def _check_seeds(chosen: Mapping[str, Any]) -> None:
    if not 1 <= chosen["seeds"] <= MAX_SEEDS:
        raise InputError(
            "bad number of seeds", got=str(chosen["seeds"]), expected=f"1 to {MAX_SEEDS}", hint="--seeds 8"
        )
    for name in ("checkpoint", "resume", "debug", "log", "plot"):
        if chosen.get(name):
            raise InputError(
                f"--{name} needs a single run", got=f"--{name} and --seeds {chosen['seeds']}", expected="one of them",
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

    with open_input(path) as file, naming_file(path):
        text = file.read(MAX_CONFIG_BYTES + 1)
        if len(text) > MAX_CONFIG_BYTES:
            raise FormatError("too long for a config file", got="more", expected=f"at most {MAX_CONFIG_BYTES:,} B")
        try:
            table = tomllib.loads(text.decode())
        except (ValueError, RecursionError) as error:  # invalid TOML, invalid UTF-8, an int with thousands of digits
            hint = 'keys and values: lr = 0.1, model = "digits"'
            raise FormatError("not TOML", got=str(error), expected="one key per line", hint=hint) from None
        kinds, found = known_keys(), dict[str, Any]()
        for name, value in table.items():
            key = ALIASES.get(name, name)
            if key in found:
                raise InputError(f"two values of {key}", got=", ".join(table), expected="one", hint=f"only {key}")
            found[key] = _checked(name, value, kinds, text.decode(), path.parent)
        return found


def known_keys() -> dict[str, type]:
    """Every key with the type of its value."""
    kinds = {}
    for name, hint in typing.get_type_hints(Settings).items():
        kinds[name] = next(kind for kind in (typing.get_args(hint) or (hint,)) if kind is not NoneType)
    options = {field.name: type(field.default) for field in fields(TrainOptions)}
    del options["loss_weights"]  # of several outputs; onchip train trains one
    return kinds | options


def _checked(name: str, value: Any, kinds: Mapping[str, type], text: str, folder: Path) -> Any:
    lines = [i for i, line in enumerate(text.splitlines(), 1) if re.match(rf"\W*{re.escape(name)}\b", line)]
    where = f"line {lines[0]}: " if lines else ""
    key = ALIASES.get(name, name)
    try:
        check_name(key, list(kinds), "key")
    except InputError as error:
        hint = error.hint or f"leave {show(name)} out"
        raise InputError(f"{where}{error.what}", got=error.got, expected=error.expected, hint=hint) from None
    kind = kinds[key]
    if isinstance(value, str) and "\0" in value:  # never a valid name, and system calls reject it
        raise InputError(f"{where}bad {name}", got=show(value), expected="text without zero bytes", hint=f"fix {name}")
    if kind is Path and isinstance(value, str):
        return folder / value
    if kind is float and type(value) is int and abs(value) <= MAX_FLOAT32:
        return float(value)
    if name == "hidden" and isinstance(value, list) and all(type(width) is int and width > 0 for width in value):
        return tuple(value)
    if name == "frozen" and isinstance(value, str | list):
        return value
    if name == "weight_decay" and isinstance(value, str | dict):
        return value
    if name == "class_weight" and isinstance(value, str | list | dict):
        return value
    if name == "hidden" and isinstance(value, str):
        return _widths(value)
    if type(value) is kind:
        return str(folder / str(value)) if name in _MAYBE_FILES and _is_file(folder / str(value)) else value
    expected = {
        str: 'a string, e.g. "digits"', Path: 'a path, e.g. "out.onnx"', int: "a whole number", float: "a number",
        bool: "true or false", tuple: '"embedding.*" or ["conv1.*", "conv2.*"]',
        NoneType: '"balanced", [1, 5] or {1 = 5}',
    }.get(kind, "whole numbers above 0, e.g. [320, 160]")  # fmt: skip
    raise InputError(f"{where}bad {name}", got=show(value), expected=expected, hint=f"fix {name}")


def _is_file(path: Path) -> bool:
    # A missing path with such a suffix counts as a file too: its reader then reports the path.
    return path.is_file() or path.suffix in (".npy", ".gz", ".csv", ".parquet", ".onnx", ".safetensors")
