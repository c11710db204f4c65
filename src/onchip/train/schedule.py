"""The learning rate of every step of a run: torch's schedules in closed form."""

from __future__ import annotations

import math

import numpy as np

from onchip.network.recipe import Array
from onchip.train.options import TrainOptions

RISE, FIRST, LAST = 0.3, 25.0, 1e4  # OneCycleLR's defaults: pct_start, div_factor, final_div_factor


def lrs_of(options: TrainOptions, epoch: int, steps: int) -> Array:
    """(steps,) float64: the learning rate of every step of an epoch, counted from 0; every epoch has so many steps.

    constant, step, cosine  one rate per epoch, as with torch's StepLR, and CosineAnnealingLR down to 0
    one_cycle               one rate per step, as with torch's OneCycleLR: from lr / 25 up to lr in the first 0.3 of the
                            run, then down to lr / 250,000, both along a cosine. Momentum stays as it is
    warmup                  the run begins with W = round(warmup * steps) steps of the rates lr / W, 2 lr / W, ..., lr.
                            Then the schedule begins: an epoch has the rate of epoch `epoch - warmup`, at least 0, in a
                            run of `epochs - warmup` epochs
    """
    numbers = np.arange(epoch * steps, (epoch + 1) * steps, dtype=np.float64)  # of the steps, in the run
    if options.schedule == "one_cycle":
        return _one_cycle(options.lr, numbers, options.epochs * steps)
    rates = np.full(steps, _lr_of_epoch(options, max(0.0, epoch - options.warmup)))
    W = round(options.warmup * steps)
    return np.where(numbers < W, options.lr * ((numbers + 1) / max(1, W)), rates)


def _lr_of_epoch(options: TrainOptions, epoch: float) -> float:
    """The rate of an epoch of the schedule, which begins with epoch 0."""
    if options.schedule == "step":
        return options.lr * options.step_factor ** int(epoch // options.step_every)
    if options.schedule == "cosine":
        return 0.5 * options.lr * (1 + math.cos(math.pi * epoch / (options.epochs - options.warmup)))
    return options.lr


def _one_cycle(lr: float, numbers: Array, total: int) -> Array:
    """The rates of these steps, of `total`."""
    top = RISE * total - 1  # not rounded; below 0 for fewer than four steps
    up = _cosine(lr / FIRST, lr, numbers / top)
    return np.where(numbers <= top, up, _cosine(lr, lr / FIRST / LAST, (numbers - top) / (total - 1 - top)))


def _cosine(first: float, last: float, share: Array) -> Array:
    """From `first` to `last`, half a period."""
    return last + (first - last) / 2 * (1 + np.cos(np.pi * share))
