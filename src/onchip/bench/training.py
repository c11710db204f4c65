"""Cases of training: steps of plain SGD through the public fit, and torch doing the same steps.

Everyone starts from the same weights and takes the same batches in the same order, so the first steps must
agree with float64, and accuracies can be compared seed by seed.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from onchip.bench.frame import Ready
from onchip.bench.peers import explained, load_torch
from onchip.bench.torch_network import torch_module
from onchip.kernels import reference
from onchip.ladders.truth import Verdict, allowed_error, scaled_error
from onchip.spec.network import Network
from onchip.spec.recipe import Array, materialise
from onchip.train.loop import fit
from onchip.train.order import epoch_order

CHECKED_STEPS = 16
_TRIAL_STEPS = 100


@dataclass(frozen=True, eq=False)
class Lesson:
    """A training job. `net` makes the untrained network of a seed."""

    net: Callable[[int], Network]
    x: Array
    y: Array
    x_test: Array
    y_test: Array
    lr: float
    batch_size: int
    threads: int
    device: str = "cpu"

    @property
    def steps(self) -> int:
        return -(-len(self.x) // self.batch_size)

    @functools.cached_property
    def truth(self) -> tuple[Array, float]:
        """Losses and last weights of the first steps in float64, flat, and the error allowed."""
        exact = self._reference_steps("float64")
        return exact, allowed_error(scaled_error(self._reference_steps("float32"), exact))

    def _reference_steps(self, dtype: str) -> Array:
        net, velocity, losses = self.net(0), dict[str, Array](), []
        for rows in self.first_batches():
            loss, gradients = reference.loss_and_gradients(net, self.x[rows], self.y[rows], "cross_entropy", dtype)
            net = reference.sgd_step(net, velocity, gradients, self.lr, 0.0)
            losses.append(loss)
        return flatten(losses, net)

    def first_batches(self) -> list[Array]:
        """Rows of the checked steps: whole batches from the front of the data, in the order of its own short epoch."""
        n = min(len(self.x), CHECKED_STEPS * self.batch_size)
        order = epoch_order(n, 0, 0)
        return [order[i : i + self.batch_size] for i in range(0, n, self.batch_size)]

    def judge(self, losses: Any, net: Network) -> Verdict:
        exact, allowed = self.truth
        return Verdict(scaled_error(flatten(losses, net), exact), allowed)


def flatten(losses: Any, net: Network) -> Array:
    """A loss curve and the weights it led to, as one array."""
    weights = [np.ravel(materialise(name, net.weights)) for name in sorted(net.weights)]
    return np.concatenate([np.asarray(losses, np.float64), *weights])


# -- ours --------------------------------------------------------------------------------------------------


def onchip_epoch(lesson: Lesson) -> Ready:
    net = lesson.net(0)
    return Ready(lambda: _fit(lesson, net, lesson.x, lesson.y, seed=0, epochs=1), lambda: _check_fit(lesson))


def _fit(lesson: Lesson, net: Network, x: Array, y: Array, seed: int, epochs: int) -> Any:
    return fit(net, x, y, lr=lesson.lr, batch_size=lesson.batch_size, epochs=epochs, seed=seed,
               device=lesson.device, threads=lesson.threads)  # fmt: skip


def _check_fit(lesson: Lesson) -> Verdict:
    n = sum(map(len, lesson.first_batches()))
    result = _fit(lesson, lesson.net(0), lesson.x[:n], lesson.y[:n], seed=0, epochs=1)
    return lesson.judge(result.losses, result.network)


def onchip_accuracy(lesson: Lesson, epochs: int) -> Ready:
    """Every run is another seed; the score is their mean test accuracy in percent."""
    from onchip.runtime.engine import compile

    scores: list[float] = []

    def run() -> None:
        seed = len(scores)
        result = _fit(lesson, lesson.net(seed), lesson.x, lesson.y, seed, epochs)
        engine = compile(result.network, lesson.device, threads=lesson.threads)
        scores.append(percent(engine(lesson.x_test), lesson.y_test))

    return Ready(run, lambda: _check_fit(lesson), score=lambda: float(np.mean(scores)))


def percent(y: Array, classes: Array) -> float:
    return 100.0 * float(np.mean(y.argmax(axis=1) == classes))


# -- torch -------------------------------------------------------------------------------------------------


class TorchRun:
    """The fastest honest form: all rows in one tensor, batches gathered by index, no .item() in the loop."""

    def __init__(self, lesson: Lesson, optimiser: str, compiled: bool, seed: int = 0) -> None:
        self.torch = load_torch(lesson.threads)
        self.lesson, self.setting = lesson, f"{optimiser} SGD"
        self.x, self.y = self.torch.from_numpy(lesson.x), self.torch.from_numpy(lesson.y)
        self.module = torch_module(lesson.net(seed)).train()
        self.optimiser = self.torch.optim.SGD(self.module.parameters(), lr=lesson.lr, **{optimiser: True})
        criterion = self.torch.nn.CrossEntropyLoss()

        def loss_of(x: Any, y: Any) -> Any:
            return criterion(self.module(x), y)

        self.loss_of = loss_of
        if compiled:
            # The backward pass is compiled with it; compiling the optimiser too gained nothing.
            self.torch._dynamo.reset()  # graphs of earlier runs count against a limit
            self.loss_of = self.torch.compile(loss_of, dynamic=False, fullgraph=True)

    def step(self, rows: Any) -> Any:
        self.optimiser.zero_grad(set_to_none=True)
        loss = self.loss_of(self.x[rows], self.y[rows])
        loss.backward()
        self.optimiser.step()
        return loss

    def epoch(self, seed: int, epoch: int, steps: int | None = None) -> None:
        order = self.torch.from_numpy(epoch_order(len(self.x), seed, epoch))
        for rows in order.split(self.lesson.batch_size)[:steps]:
            self.step(rows)

    def check(self) -> Verdict:
        losses = [self.step(self.torch.from_numpy(rows)).item() for rows in self.lesson.first_batches()]
        net = self.lesson.net(0)
        names = [name for node in net.nodes for name in node.weights.values()]
        weights = {name: p.detach().numpy().copy() for name, p in zip(names, self.module.parameters(), strict=True)}
        return self.lesson.judge(losses, net.replace(weights=weights))

    def accuracy(self) -> float:
        with self.torch.inference_mode():
            return percent(self.module(self.torch.from_numpy(self.lesson.x_test)).numpy(), self.lesson.y_test)


def fastest_optimiser(lesson: Lesson, compiled: bool) -> str:
    """foreach or fused, whichever takes these steps faster here and now."""
    seconds = {}
    for optimiser in ("foreach", "fused"):
        run = TorchRun(lesson, optimiser, compiled)
        run.epoch(0, 0, _TRIAL_STEPS // 4)
        start = time.perf_counter()
        run.epoch(0, 0, _TRIAL_STEPS)
        seconds[optimiser] = time.perf_counter() - start
    return min(seconds, key=lambda name: seconds[name])


def torch_epoch(lesson: Lesson, compiled: bool) -> Ready:
    with explained("torch.compile" if compiled else "torch"):
        optimiser = fastest_optimiser(lesson, compiled)
        run = TorchRun(lesson, optimiser, compiled)
    return Ready(lambda: run.epoch(0, 0), lambda: TorchRun(lesson, optimiser, compiled).check(), run.setting)


def torch_accuracy(lesson: Lesson, epochs: int) -> Ready:
    optimiser = fastest_optimiser(lesson, compiled=False)
    scores: list[float] = []

    def run() -> None:
        seed = len(scores)
        torch_run = TorchRun(lesson, optimiser, compiled=False, seed=seed)
        for epoch in range(epochs):
            torch_run.epoch(seed, epoch)
        scores.append(torch_run.accuracy())

    def check() -> Verdict:
        return TorchRun(lesson, optimiser, compiled=False).check()

    return Ready(run, check, f"{optimiser} SGD", score=lambda: float(np.mean(scores)))
