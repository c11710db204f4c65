"""Training a generator of pictures against a discriminator, step by step.

A step first trains the discriminator on a batch of real and of generated pictures, then the generator through it. Both
losses are least squares (LSGAN, Mao et al. 2017): the discriminator returns 1 for real pictures and 0 for others. The
trained generator has the moving averages of its weights. Random values depend on the seed and the number of the step
alone, so a run that continues from a checkpoint ends with the same bits.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from onchip.errors import InputError, KernelError
from onchip.network.graph import Network
from onchip.network.recipe import Array
from onchip.plan.kernel import Job
from onchip.runtime.placement import place
from onchip.train.options import TrainOptions
from onchip.train.order import epoch_order, hold_out
from onchip.train.training_step import training_step
from onchip.workloads import faces, gan
from onchip.workloads.gan import draw_changes, picture_values

LEAST_PICTURES = 16
FEW_PICTURES = 10_000  # with fewer, they are changed at random
HELD_SHARE = 0.1  # of the pictures, for the score
SAMPLES_SIDE = 8  # of the square of samples
MOST_FRAMES, FRAME_SIDE = 60, 4  # of the animation, and the side of its square
BETA1 = 0.5  # of Adam, as of DCGAN: with 0.9 generator and discriminator oscillate
_STEP, _SAMPLES = 1, 2  # what random values are for


@dataclass(frozen=True)
class GanOptions:
    """Everything but the pictures that determines the bits of a run."""

    width: int = 64  # channels of the generator's last hidden layer; 64 for 64x64 pictures: the workload's network
    latent: int = faces.LATENT
    batch_size: int = 32
    epochs: int = 100
    lr: float = 2.5e-4  # of the discriminator's Adam; the generator has twice as much
    ema: float = 0.995  # of the generator's weights
    seed: int = 0
    augment: bool = False  # shift, cut and brighten the pictures, real and generated (gan.draw_changes)
    flip: bool = False  # mirror half of the real pictures

    def __post_init__(self) -> None:
        TrainOptions(batch_size=self.batch_size, epochs=self.epochs, lr=self.lr, ema=self.ema, seed=self.seed)
        for name in ("width", "latent"):
            if not 1 <= getattr(self, name) <= 1024:
                got, hint = str(getattr(self, name)), f"--{name} {getattr(GanOptions, name)}"
                raise InputError(f"bad {name}", got=got, expected="1 to 1,024", hint=hint)


class GanRun:
    """A run at some step: `step` it, `samples` it, `checkpoint` it."""

    def __init__(self, images: Array, options: GanOptions, device: str = "auto", threads: int | None = None) -> None:
        """images  (n, side, side, 1 or 3) uint8; a tenth is held out"""
        if len(images) < LEAST_PICTURES:
            raise InputError("too few pictures", got=str(len(images)), expected=f"at least {LEAST_PICTURES}")
        self.options, self.size = options, gan.size_of(images)
        train, held = hold_out(len(images), HELD_SHARE, 0)  # the same for every seed: scores are comparable
        self.train, self.held = images[train], images[held]
        self.batch_size = min(options.batch_size, len(train))
        self.steps_per_epoch = len(train) // self.batch_size
        self.frames: list[Array] = []
        net = gan.generator(self.size, options.width, options.latent, options.seed)
        judge = gan.discriminator_weights(self.size, options.width, options.seed)
        how: dict[str, Any] = {
            "loss": "mse",
            "optimiser": "adam",
            "beta1": BETA1,
            "batch_size": self.batch_size,
            "threads": threads,
        }
        # The first step only holds the discriminator's weights, so that the second one reads them where the third one
        # changes them.
        holds = training_step(gan.discriminator_alone(judge, self.size), lr=options.lr, device=device, **how)
        ours = [name for node in net.nodes for name in node.weights.values()]
        statistics = [name for name in (*ours, *judge) if name.endswith((".mean", ".var"))]
        augments = self.size, options.augment
        self._of_generator = training_step(
            gan.generator_through(net, judge, *augments), trainable=list(dict.fromkeys((*ours, *statistics))),
            state=holds, lr=2 * options.lr, ema=options.ema, **how,
        )  # fmt: skip
        self._of_judge = training_step(
            gan.discriminator_on_both(net, judge, *augments), trainable=list(dict.fromkeys((*judge, *statistics))),
            state=self._of_generator, lr=options.lr, **how,
        )  # fmt: skip
        self._net, self.threads = net, threads
        self.chosen = holds.chosen
        self.parameters = net.parameters, sum(array.size for array in judge.values())

    # -- training --------------------------------------------------------------------------------------------------

    @property
    def steps_done(self) -> int:
        return self._of_generator.steps_done

    @property
    def steps(self) -> int:
        return self.steps_per_epoch * self.options.epochs

    @property
    def epochs_done(self) -> int:
        return self.steps_done // self.steps_per_epoch

    @property
    def plans(self) -> Mapping[str, Any]:
        return {"generator": self._of_generator.plan, "discriminator": self._of_judge.plan}

    def step(self) -> tuple[Any, Any]:
        """One update of the discriminator, then one of the generator; their losses, which are read when used."""
        o, B = self.options, self.batch_size
        epoch, at = divmod(self.steps_done, self.steps_per_epoch)
        rng = np.random.default_rng((o.seed, _STEP, self.steps_done))
        real = self.train[self._order(epoch)[at * B : (at + 1) * B]]
        if o.flip:
            real = np.where(rng.integers(0, 2, (B, 1, 1, 1)), real[:, :, ::-1], real)
        changes, judged = (*self._changes(rng), *self._changes(rng)), np.tile(np.array([1, 0], np.float32), (B, 1))
        of_judge = self._of_judge(picture_values(real), self._latent(rng, B), *changes, judged)
        z, change = self._latent(rng, B), self._changes(rng)
        return of_judge, self._of_generator(z, *change, np.ones((B, 1), np.float32))

    def end_epoch(self) -> tuple[float, float]:
        """The mean losses of the epoch that is done, the discriminator's and the generator's; keeps a frame."""
        begin = (self.epochs_done - 1) * self.steps_per_epoch
        of_judge, of_generator = (float(step.losses[begin:].mean()) for step in (self._of_judge, self._of_generator))
        if not math.isfinite(of_judge + of_generator):
            raise KernelError(
                f"training diverged in epoch {self.epochs_done}", got=f"losses {of_judge} and {of_generator}",
                expected="finite losses", hint=f"a smaller learning rate: --lr {self.options.lr / 2:g}",
            )  # fmt: skip
        if self.epochs_done in _frame_epochs(self.options.epochs):
            self.frames.append(squared(self.samples(FRAME_SIDE**2)))
        return of_judge, of_generator

    def epoch_losses(self) -> list[tuple[float, float]]:
        """Of all epochs that are done."""
        count = self.epochs_done * self.steps_per_epoch
        both = [
            s.losses[:count].reshape(-1, self.steps_per_epoch).mean(axis=1)
            for s in (self._of_judge, self._of_generator)
        ]
        return [(float(d), float(g)) for d, g in zip(*both, strict=True)]

    def _latent(self, rng: np.random.Generator, B: int) -> Array:
        return rng.standard_normal((B, self.options.latent), np.float32)

    def _changes(self, rng: np.random.Generator) -> tuple[Array, ...]:
        return draw_changes(self.size, self.batch_size, rng) if self.options.augment else ()

    def _order(self, epoch: int) -> Array:
        if self._epoch_order[0] != epoch:
            self._epoch_order = epoch, epoch_order(len(self.train), self.options.seed, epoch)
        return self._epoch_order[1]

    _epoch_order: tuple[int, Array] = (-1, np.zeros(0, np.int64))

    # -- the generator ---------------------------------------------------------------------------------------------

    def weights(self) -> dict[str, Array]:
        """The generator's: averages, and running statistics."""
        now = self._of_generator.weights
        return {
            name: array for name, array in {**now, **self._of_generator.averages}.items() if name in self._net.weights
        }

    def network(self) -> Network:
        """The trained generator: (B, latent) -> (B, side, side, colours) in [-1, 1]."""
        return self._net.replace(weights={**self._net.weights, **self.weights()})

    def samples(self, count: int, seed: int | None = None) -> Array:
        """Generated pictures, bytes (count, side, side, colours); without a seed, the same values in each epoch."""
        rng = np.random.default_rng((self.options.seed, _SAMPLES) if seed is None else seed)
        self._drawn.write_state(self.weights())
        pictures = []
        for begin in range(0, count, SAMPLES_SIDE**2):
            z = self._latent(rng, min(SAMPLES_SIDE**2, count - begin))
            (values,) = self._drawn.run({"z": z}, len(z)).values()
            pictures.append(picture_bytes(values))
        return np.concatenate(pictures)

    @functools.cached_property
    def _drawn(self) -> Any:
        """The generator on the device, with weights that are written before each use."""
        used = dict.fromkeys(name for node in self._net.nodes for name in node.weights.values())
        net = Network(
            self._net.inputs, self._net.nodes, self._net.outputs, self._net.weights, self._net.name,
            state=dict.fromkeys(used, ""),
        )  # fmt: skip
        plan, backend, _ = place(net, self.chosen.partition(" ")[0], Job("fp32", SAMPLES_SIDE**2), self.threads)
        return backend.bind_step(plan)

    # -- checkpoints -----------------------------------------------------------------------------------------------

    @property
    def job(self) -> dict[str, Any]:
        """The options that a checkpoint must have been written with; a run can continue to more epochs."""
        return {name: value for name, value in dataclasses.asdict(self.options).items() if name != "epochs"}

    def checkpoint(self) -> dict[str, Array]:
        """Everything that the rest of the run depends on, but the pictures and the options."""
        parts = {"g": self._of_generator.checkpoint(), "d": self._of_judge.checkpoint()}
        arrays = {f"{part}/{name}": array for part, found in parts.items() for name, array in found.items()}
        return arrays | ({"frames": np.stack(self.frames)} if self.frames else {})

    def resume(self, arrays: Mapping[str, Array]) -> None:
        """Continue from the arrays of a checkpoint of this job."""
        for part, step in (("g", self._of_generator), ("d", self._of_judge)):
            step.resume({name.partition("/")[2]: a for name, a in arrays.items() if name.startswith(f"{part}/")})
        self.frames = list(arrays["frames"]) if "frames" in arrays else []


def squared(images: Array) -> Array:
    """N^2 pictures (N^2, H, W, C) as one of N by N tiles: (N H, N W, C)."""
    count, H, W, C = images.shape
    N = math.isqrt(count)
    return images.reshape(N, N, H, W, C).transpose(0, 2, 1, 3, 4).reshape(N * H, N * W, C)


def picture_bytes(values: Array) -> Array:
    """The nearest bytes to values in [-1, 1]."""
    return np.rint((values + 1) * 127.5).clip(0, 255).astype(np.uint8)


def _frame_epochs(epochs: int) -> set[int]:
    """The epochs after which the animation has a frame."""
    return {int(at) for at in np.linspace(1, epochs, min(epochs, MOST_FRAMES)).round()}
