"""Checkpoints of a training run, written atomically.

A run's folder holds its last two checkpoints, `checkpoint-<steps>.safetensors`. Each contains everything the rest of
the run depends on, and its digest. A run that was killed at any moment resumes from the newest one; its final bits
equal those of an uninterrupted run.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from onchip.errors import FormatError, InputError
from onchip.files import check_writable, write_error
from onchip.formats.graph_json import graph_to_json, parse_json
from onchip.formats.weights.tensor_file import digest_of, read_tensors, write_tensors
from onchip.network.graph import Network
from onchip.network.reading import fields, name_of, show, whole
from onchip.network.recipe import Array, materialise
from onchip.train.checkpoint_check import NAMES, check_content
from onchip.train.options import TrainOptions
from onchip.train.training_run import Checkpoint, TrainingRun

VERSION = 6
KEPT = 2
_NAME = "checkpoint-{:012d}.safetensors"
_PATTERN = "checkpoint-*.safetensors"
_ENTRY = "onchip_checkpoint"


class Checkpoints:
    """The checkpoints of one job in one folder."""

    def __init__(
        self, folder: Path, net: Network, options: TrainOptions, data: Mapping[str, Array], state: Mapping[str, Array]
    ) -> None:
        """data   the training data, by name
        state  optimiser state of an earlier run that this one continues
        """
        self.folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for left in folder.glob(f".{_PATTERN}.*.tmp"):  # left by a run that was killed while writing
                left.unlink()
        except OSError as error:
            raise write_error(folder, error) from None
        check_writable(folder / _NAME.format(0))
        # Everything that determines the run's bits; a checkpoint must match it.
        self.job: dict[str, Any] = {
            "options": dataclasses.asdict(options),
            "network": digest_of(graph_to_json(net), {name: materialise(name, net.weights) for name in net.weights}),
            "data": digest_of("", data),
            "state": digest_of("", state),
        }

    def paths(self) -> list[Path]:
        """Newest first."""
        return sorted(self.folder.glob(_PATTERN), reverse=True)

    def save(self, at: Checkpoint) -> None:
        """Write a checkpoint, keep the last two. Skip it if a value is not finite: such a run can only diverge."""
        if not all(
            np.isfinite(array).all()
            for array in (at.losses, at.output_losses, *at.weights.values(), *at.best_weights.values())
        ):
            return
        arrays = {"losses": at.losses} | ({"output_losses": at.output_losses} if at.output_losses.size else {})
        for kind, group in (("weight", at.weights), ("state", at.state), ("best", at.best_weights)):
            arrays |= {f"{kind}/{name}": array for name, array in group.items()}
        header = {
            "version": VERSION, "job": self.job, "epoch": at.epoch, "step": at.step, "epoch_correct": at.epoch_correct,
            "epoch_rows": at.epoch_rows, "epoch_seconds": at.epoch_seconds,
            "seconds": at.seconds, "history": at.history, "best_epoch": at.best_epoch,
        }  # fmt: skip
        text = json.dumps(header)
        metadata = {_ENTRY: text, "sha256": digest_of(text, arrays)}
        write_tensors(self.folder / _NAME.format(len(at.losses)), arrays, metadata)
        for old in self.paths()[KEPT:]:
            old.unlink(missing_ok=True)

    def load(self, run: TrainingRun) -> Checkpoint | None:
        """Load the newest checkpoint; None if there is none.

        If it is damaged, the FormatError names the last good one: resuming from an older one is the user's choice.

        run  the run, before its first step
        """
        paths = self.paths()
        if not paths:
            return None
        try:
            return self._checked(paths[0], run)
        except FormatError as error:
            good = next((path for path in paths[1:] if self._is_sound(path, run)), None)
            hint = f"remove it to continue from {good}" if good else "remove it to start over: no other is left"
            got = f"{error.what}: {error.got}" + (f", expected {error.expected}" if error.expected else "")
            raise FormatError(
                f"checkpoint {paths[0]} is damaged", got=got, expected="the checkpoint that the run wrote", hint=hint
            ) from None

    def _is_sound(self, path: Path, run: TrainingRun) -> bool:
        try:
            self._checked(path, run)
        except InputError:
            return False
        return True

    def _checked(self, path: Path, run: TrainingRun) -> Checkpoint:
        """Read and check a checkpoint; FormatError if it is invalid, InputError if it belongs to another run."""
        header, arrays = _read(path)
        self._check_job(path, header["job"])
        check_content(header, arrays, run)
        groups: dict[str, dict[str, Array]] = {"weight": {}, "state": {}, "best": {}}
        for name, array in arrays.items():
            kind, slash, rest = name.partition("/")
            if slash:
                groups[kind][rest] = array
        return Checkpoint(
            epoch=header["epoch"], step=header["step"], epoch_correct=header["epoch_correct"],
            epoch_rows=header["epoch_rows"], epoch_seconds=header["epoch_seconds"], seconds=header["seconds"],
            history=tuple(header["history"]), best_epoch=header["best_epoch"], losses=arrays["losses"],
            output_losses=arrays.get("output_losses", np.zeros((len(arrays["losses"]), 0))),
            weights=groups["weight"], state=groups["state"], best_weights=groups["best"],
        )  # fmt: skip

    def _check_job(self, path: Path, job: Any) -> None:
        fields(job, tuple(self.job), "its job")
        for what, got in (("network", "another network"), ("data", "other data"), ("state", "another state")):
            if job[what] != self.job[what]:
                raise InputError(
                    f"checkpoint {path} belongs to another run", got=got, expected="the run that wrote it",
                    hint="resume with the same network and data, or choose another folder",
                )  # fmt: skip
        fields(job["options"], tuple(self.job["options"]), "its options")
        try:
            options = dataclasses.asdict(TrainOptions.of(job["options"]))
        except InputError as error:
            raise FormatError(error.what, got=error.got, expected=error.expected) from None
        for name, value in self.job["options"].items():
            if options[name] != value:
                raise InputError(
                    f"checkpoint {path} belongs to another run", got=f"{name}={value}",
                    expected=f"{name}={options[name]}", hint="resume with the same options, or choose another folder",
                )  # fmt: skip


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Array]]:
    """Read the JSON and arrays of a checkpoint; FormatError if its digest does not match."""
    metadata, arrays = read_tensors(path)
    fields(metadata, (_ENTRY, "sha256"), "its metadata")
    assert isinstance(metadata, dict)
    text, digest = metadata[_ENTRY], metadata["sha256"]
    if not isinstance(text, str):
        raise FormatError("not a checkpoint", got=f"no text in '{_ENTRY}'", expected="a file that fit wrote")
    if digest != digest_of(text, arrays):
        raise FormatError("its content has changed", got="another digest", expected=name_of(digest))
    header = parse_json(text, "the checkpoint")
    version = header.get("version") if isinstance(header, dict) else None
    if type(version) is int and version != VERSION:
        raise InputError(
            f"checkpoint {path} is of another version", got=f"version {show(version)}", expected=f"version {VERSION}",
            hint="resume with the onchip that wrote it, or choose another folder",
        )  # fmt: skip
    fields(header, NAMES, "the checkpoint")
    assert isinstance(header, dict)
    whole(header["version"], "version", VERSION, VERSION)
    return header, arrays
