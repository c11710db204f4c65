"""fit: mini-batch training of a network, epoch by epoch."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from onchip.errors import InputError, ShapeError
from onchip.plan.kernel import LOSSES, Job
from onchip.plan.planner import Plan
from onchip.runtime.cpu import bake, check_threads
from onchip.runtime.engine import check_rows, place
from onchip.spec.network import Network
from onchip.spec.recipe import Array
from onchip.train.order import epoch_order

if TYPE_CHECKING:
    from onchip.kernels.cpu.mlp_train import Trainer

_REPORT_SECONDS = 0.1  # how often progress is told, and how soon Ctrl-C is heard


@dataclass(frozen=True)
class Progress:
    """Where a run stands: after `step` of `steps` in `epoch` (from 1) of `epochs`."""

    epoch: int
    epochs: int
    step: int
    steps: int
    loss: float  # mean of the epoch so far
    samples_per_s: float


@dataclass(frozen=True, eq=False)
class FitResult:
    network: Network
    losses: Array  # float64, one number a step: the batch's loss before the step's update
    epoch_losses: tuple[float, ...]
    seconds: float
    plan: Plan
    chosen: str


def fit(
    net: Network,
    x: Array,
    y: Array,
    *,
    loss: str = "cross_entropy",
    lr: float = 0.03,
    momentum: float = 0.0,
    batch_size: int = 64,
    epochs: int = 30,
    seed: int = 0,
    device: str = "auto",
    threads: int | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> FitResult:
    """Train the network on rows x and return it with its loss curve; `net` itself does not change.

    x          (n, ...) of the network's input type
    y          (n,) integer classes for "cross_entropy" (the network's output is logits, the loss the batch's mean);
               (n, D_out) float32 for "half_sse" (half the sum of squared errors over the batch)
    momentum   v = momentum v + gradient; w = w - lr v
    The order of the rows is train.order.epoch_order(n, seed, epoch). Same seed, same machine kind: same bits.
    """
    x = check_rows(x, net.input)
    y = _check_targets(net, x, y, loss)
    batch_size = _check_options(lr, momentum, batch_size, epochs, seed, len(x))
    job = Job(batch=batch_size, loss=loss, momentum=momentum > 0)
    plan, _, chosen = place(net, device, job, threads)
    trainer = _trainer(plan, check_threads(threads))
    rows = x.reshape(len(x), -1)
    steps = -(-len(x) // batch_size)
    losses, epoch_losses = [], []
    trainer.steps(rows, y, np.zeros(0, np.int64), lr, momentum)  # no step: compiles before the clock starts
    started = time.perf_counter()
    for epoch in range(epochs):
        order = epoch_order(len(x), seed, epoch)
        done, piece, epoch_started = 0, min(steps, 16), time.perf_counter()
        told: list[Array] = []
        while done < steps:
            begin = time.perf_counter()
            told.append(trainer.steps(rows, y, order[done * batch_size : (done + piece) * batch_size], lr, momentum))
            done = min(steps, done + piece)
            now = time.perf_counter()
            piece = max(1, round(piece * min(4.0, _REPORT_SECONDS / max(now - begin, 1e-6))))
            if on_progress is not None:
                rate = min(len(x), done * batch_size) / (now - epoch_started)
                on_progress(Progress(epoch + 1, epochs, done, steps, float(np.concatenate(told).mean()), rate))
        losses.append(np.concatenate(told))
        epoch_losses.append(float(losses[-1].mean()))
    seconds = time.perf_counter() - started
    trained = net.replace(weights={**net.weights, **trainer.weights()})
    return FitResult(trained, np.concatenate(losses), tuple(epoch_losses), seconds, plan, chosen)


def _trainer(plan: Plan, threads: int) -> Trainer:
    from onchip.kernels.cpu import TRAINING

    (group,) = plan.groups  # a training kernel claims the whole network
    made: dict[str, Array] = {}
    weights = {name: bake(recipe, plan, made) for name, recipe in group.claim.recipes.items()}
    kernel = next(k for k in TRAINING if k.name == group.claim.kernel)
    return kernel.trainer(group.claim, plan.job, weights, threads)


def _check_targets(net: Network, x: Array, y: Any, loss: str) -> Array:
    D_out = net.output.row_size
    if loss not in LOSSES:
        raise InputError("unknown loss", got=loss, expected=" or ".join(LOSSES), hint=LOSSES[0])
    if not isinstance(y, np.ndarray):
        raise ShapeError(
            "targets are not an array", got=type(y).__name__, expected="a NumPy array", hint="np.asarray(y)"
        )
    if len(x) == 0:
        raise InputError("nothing to train on", got="0 rows", expected="at least 1")
    if loss == "cross_entropy":
        if y.shape != (len(x),) or y.dtype.kind not in "iu":
            raise ShapeError(
                "classes do not fit", got=f"{y.dtype.name}{list(y.shape)}", expected=f"integers [{len(x)}]"
            )
        bad = np.flatnonzero((y < 0) | (y >= D_out))
        if bad.size:
            raise InputError(
                "a class is out of range", got=f"{y[bad[0]]} in row {bad[0]}", expected=f"0 to {D_out - 1}"
            )
        return np.ascontiguousarray(y, np.int64)
    if y.shape != (len(x), D_out) or y.dtype != np.float32:
        raise ShapeError(
            "targets do not fit", got=f"{y.dtype.name}{list(y.shape)}", expected=f"float32[{len(x)}, {D_out}]"
        )
    return np.ascontiguousarray(y)


def _check_options(lr: float, momentum: float, batch_size: int, epochs: int, seed: int, n: int) -> int:
    if not (lr > 0 and np.isfinite(lr)):
        raise InputError("bad learning rate", got=str(lr), expected="a number above 0", hint="lr=0.03")
    if not 0 <= momentum < 1:
        raise InputError("bad momentum", got=str(momentum), expected="at least 0, below 1", hint="momentum=0.9")
    if batch_size < 1:
        raise InputError("bad batch size", got=str(batch_size), expected="at least 1", hint="batch_size=64")
    if epochs < 1:
        raise InputError("bad number of epochs", got=str(epochs), expected="at least 1", hint="epochs=30")
    if seed < 0:
        raise InputError("bad seed", got=str(seed), expected="at least 0", hint="seed=0")
    return min(batch_size, n)
