"""A whole job of training a generator of pictures: steps, checkpoints, pictures of samples, and a score at the end."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from onchip.errors import FormatError, InputError
from onchip.files import check_writable, write_error
from onchip.formats.gif import GifWriter
from onchip.formats.graph_json import parse_json
from onchip.formats.images import PngWriter
from onchip.formats.weights.tensor_file import digest_of, read_tensors, write_tensors
from onchip.network.graph import Network
from onchip.network.recipe import Array
from onchip.workloads.frechet import FEATURES, FeatureNetwork, nearest_difference
from onchip.workloads.gan_training import SAMPLES_SIDE, GanRun

KEPT = 2  # checkpoints
_NAME, _PATTERN, _ENTRY, VERSION = "checkpoint-{:012d}.safetensors", "checkpoint-*.safetensors", "onchip_gan", 1
_SCORED = 2_000  # generated pictures


@dataclass(frozen=True)
class GanProgress:
    epochs_done: float
    epochs: int
    d_loss: float
    g_loss: float
    pictures_per_s: float


@dataclass(frozen=True)
class GanScore:
    """Frechet distances to the held-out pictures, by the features of workloads/frechet.py."""

    generated: float
    training: float  # of the training pictures: what a perfect generator has, about
    noise: float  # of random bytes
    features: int
    feature_accuracy: float | None  # of the feature network, at the turns of its training pictures
    held_out: int  # pictures
    # Differences to the most similar training picture, of bytes: far less for generated ones would mean that the
    # generator repeats the pictures that it was trained on.
    nearest_generated: float
    nearest_held_out: float


@dataclass(frozen=True, eq=False)
class GanResult:
    network: Network
    epoch_losses: list[tuple[float, float]]  # of the discriminator and the generator
    score: GanScore
    seconds: float  # of this process


def train_gan(
    run: GanRun,
    *,
    checkpoint: Path | None = None,
    checkpoint_every: float = 10.0,
    resume: bool = False,
    samples: Path | None = None,
    on_progress: Callable[[GanProgress], None] = lambda p: None,
    on_epoch: Callable[[int, float, float], None] = lambda epoch, d_loss, g_loss: None,
) -> GanResult:
    """Train to the last epoch.

    checkpoint  a folder: a run that was stopped continues from it with `resume`
    samples     a .png of 8 x 8 samples, written anew after each epoch; the .gif next to it has up to 60 epochs
    """
    kept = None if checkpoint is None else GanCheckpoints(checkpoint, run)
    if kept is not None:
        kept.begin(resume)
    begin = saved = time.perf_counter()
    first = run.steps_done
    while run.steps_done < run.steps:
        losses = run.step()
        now = time.perf_counter()
        if run.steps_done % run.steps_per_epoch == 0:
            on_epoch(run.epochs_done, *run.end_epoch())
            if samples is not None:
                write_samples(samples, run)
        speed = (run.steps_done - first) * run.batch_size / (now - begin)
        d_loss, g_loss = map(float, losses)
        on_progress(GanProgress(run.steps_done / run.steps_per_epoch, run.options.epochs, d_loss, g_loss, speed))
        if kept is not None and (now - saved >= checkpoint_every or run.steps_done == run.steps):
            kept.save()
            saved = time.perf_counter()
    if samples is not None:
        write_samples(samples, run)
        write_frames(samples.with_suffix(".gif"), np.stack(run.frames))
    return GanResult(run.network(), run.epoch_losses(), score(run), time.perf_counter() - begin)


def write_samples(path: Path, run: GanRun) -> None:
    pictures = run.samples(SAMPLES_SIDE**2)
    with PngWriter(path, pictures.shape, pictures.dtype) as file:
        file.write(pictures)


def write_frames(path: Path, frames: Array) -> None:
    with GifWriter(path, frames.shape, frames.dtype) as file:
        file.write(frames)


def score(run: GanRun) -> GanScore:
    net = FeatureNetwork(run.train, run.size, run.chosen.partition(" ")[0], run.threads)
    noise = np.random.default_rng(0).integers(0, 256, (_SCORED, *run.size.shape), np.uint8)
    pictures = run.samples(_SCORED, seed=run.options.seed)
    generated, training, of_noise = (net.distance(run.held, images) for images in (pictures, run.train, noise))
    nearest = (nearest_difference(images, run.train) for images in (pictures, run.held))
    return GanScore(generated, training, of_noise, FEATURES, net.accuracy, len(run.held), *nearest)


class GanCheckpoints:
    """The last two checkpoints of a run, in a folder."""

    def __init__(self, folder: Path, run: GanRun) -> None:
        self.folder, self._run = folder, run
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise write_error(folder, error) from None
        check_writable(folder / _NAME.format(0))
        self._job = {**run.job, "pictures": digest_of("", {"train": run.train})}

    def begin(self, resume: bool) -> None:
        """Continue from the newest checkpoint; InputError if there is one that is not to be continued."""
        paths = self._paths()
        if resume and paths:
            self._run.resume(self._read(paths[0]))
        elif paths:
            raise InputError(
                "the folder has checkpoints of another run", got=str(paths[0]), expected="no checkpoint",
                hint="--resume to continue it, or another folder",
            )  # fmt: skip

    def save(self) -> None:
        arrays, text = self._run.checkpoint(), json.dumps({"version": VERSION, "job": self._job})
        metadata = {_ENTRY: text, "sha256": digest_of(text, arrays)}
        write_tensors(self.folder / _NAME.format(self._run.steps_done), arrays, metadata)
        for old in self._paths()[KEPT:]:
            old.unlink(missing_ok=True)

    def _paths(self) -> list[Path]:
        """Newest first."""
        return sorted(self.folder.glob(_PATTERN), reverse=True)

    def _read(self, path: Path) -> dict[str, Array]:
        metadata, arrays = read_tensors(path)
        text = metadata.get(_ENTRY) if isinstance(metadata, dict) else None
        if not isinstance(metadata, dict) or not isinstance(text, str):
            hint = "another folder"
            raise FormatError(f"{path} is no checkpoint of onchip train faces", got="other content", hint=hint)
        if metadata.get("sha256") != digest_of(text, arrays):
            got, hint = "another digest", f"remove it to continue from the one before: rm {path}"
            raise FormatError(f"checkpoint {path} is damaged", got=got, expected="the digest in it", hint=hint)
        head: Any = parse_json(text, "the checkpoint")
        job = head.get("job") if isinstance(head, dict) else None
        if not isinstance(job, dict) or head.get("version") != VERSION:
            got, hint = "another version", "resume with the onchip that wrote it, or choose another folder"
            raise InputError(f"checkpoint {path} is of another version", got=got, expected=str(VERSION), hint=hint)
        for name, value in self._job.items():
            if job.get(name) != value:
                got, expected = f"{name}={job.get(name)}", f"{name}={value}"
                if name == "pictures":
                    got, expected = "other pictures", "the pictures of this run"
                hint = "resume with the same options and pictures, or choose another folder"
                raise InputError(f"checkpoint {path} belongs to another run", got=got, expected=expected, hint=hint)
        return arrays
