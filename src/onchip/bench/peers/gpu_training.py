"""torch and JAX as peers in training on a GPU, in the fastest equivalent forms we know.

Rows, weights and the row order are on the GPU, where every epoch draws a new order. "torch graph" is a whole epoch as
one CUDA graph of compiled steps without autograd; "jax" is lax.scan over an epoch's batches, or over many epochs of a
full batch; "torch eager" is the usual code: autograd and an optimiser.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from onchip.bench.cases.gpu_training import VERIFIED_STEPS, Build, EpochJob, PeerRun
from onchip.bench.cases.training import TrainingCase
from onchip.bench.frame import UnavailableError
from onchip.bench.peers.gpu import Allowance, load_jax
from onchip.bench.peers.torch_training import Autograd, torch_layers
from onchip.bench.stage import TorchStage
from onchip.network.layers import ReLU, Sigmoid
from onchip.network.recipe import Array
from onchip.train.options import TrainOptions

Tensor = Any
COMPILE_S, JAX_S = 60.0, 100.0  # seconds for torch.compile, and for JAX, per benchmark
FULL_BATCHES = 50  # epochs of a full batch per graph, or per call of JAX


def make_training_peers() -> dict[str, Build]:
    """Engine -> its builder, for one benchmark: they share a time allowance."""
    return {
        "jax": functools.partial(jax_scan, Allowance(JAX_S), {}),
        "torch graph": functools.partial(torch_graph, Allowance(COMPILE_S)),
    }


def is_full(training: TrainingCase) -> bool:
    """Whether an epoch is one step over all rows, unshuffled."""
    return training.options.batch_size >= len(training.x) and not training.options.shuffle


def first_order(training: TrainingCase) -> Array:
    """The row order of fit's first epoch."""
    return np.concatenate(training.batches(0))[: len(training.x)]


# -- torch -------------------------------------------------------------------------------------------------


class TorchSteps:
    """Rows and weights on the GPU, and a hand-written SGD step: Linear layers with biases, ReLU and Sigmoid."""

    def __init__(self, training: TrainingCase, stage: TorchStage) -> None:
        self.torch, self.options = stage.torch, training.options
        _set_precision(stage, training)
        self.x, self.y = (self.torch.from_numpy(array).to(stage.device) for array in (training.x, training.y))
        self.order = self.torch.arange(len(training.x), device=stage.device)
        self.layers, self._w, self._b = torch_layers(self.torch, training.net(0))
        self.w, self.b = ([w.to(stage.device, copy=True) for w in weights] for weights in (self._w, self._b))
        self.vw, self.vb = ([self.torch.zeros_like(w) for w in weights] for weights in (self.w, self.b))

    def restart(self) -> None:
        """Reset to the initial weights."""
        for current, initial in zip((*self.w, *self.b), (*self._w, *self._b), strict=True):
            current.copy_(initial)
        for v in (*self.vw, *self.vb):
            v.zero_()

    def step(self, rows: Tensor | None) -> Tensor:
        """One update; returns the batch's loss before it. rows: indices; None: all."""
        x, y = (self.x, self.y) if rows is None else (self.x[rows], self.y[rows])
        torch, h = self.torch, [x]
        for layer, w, b in zip(self.layers, self.w, self.b, strict=True):
            z = torch.addmm(b, h[-1], w.t())
            h.append(torch.sigmoid(z) if layer.activation is Sigmoid else torch.relu(z) if layer.activation else z)
        if self.options.loss == "cross_entropy":
            logp = torch.log_softmax(h[-1], 1)
            loss = torch.nn.functional.nll_loss(logp, y)
            classes = torch.arange(logp.shape[1], device=y.device)
            dz = (logp.exp() - (y[:, None] == classes).float()) / len(x)
        else:
            dz = h[-1] - y
            loss = 0.5 * dz.square().sum()
        for i in reversed(range(len(self.layers))):
            if self.layers[i].activation is Sigmoid:
                dz = dz * h[i + 1] * (1 - h[i + 1])
            elif self.layers[i].activation is ReLU:
                dz = dz * (h[i + 1] > 0)
            dh = dz @ self.w[i] if i else dz  # before the update of w
            self._update(i, dz, h[i])
            dz = dh
        return loss

    def _update(self, i: int, dz: Tensor, h: Tensor) -> None:
        lr, momentum = self.options.lr, self.options.momentum
        if not momentum:  # a gradient that is used once needs no buffer
            self.w[i].addmm_(dz.t(), h, alpha=-lr)
            self.b[i].sub_(dz.sum(0), alpha=lr)
            return
        for w, v, gradient in ((self.w[i], self.vw[i], dz.t() @ h), (self.b[i], self.vb[i], dz.sum(0))):
            v.mul_(momentum).add_(gradient)
            w.sub_(v, alpha=lr)


def _set_precision(stage: TorchStage, training: TrainingCase) -> None:
    stage.torch.set_float32_matmul_precision("high" if training.options.precision == "tf32" else "highest")


def torch_graph(allowance: Allowance, job: EpochJob, stage: TorchStage) -> PeerRun:
    """Epochs as one graph; a short last batch is not compiled, as that would double the compile time."""
    torch, training = stage.torch, job.training
    size, full = training.options.batch_size, is_full(training)
    bytes_before = stage.memory_bytes()
    with torch.no_grad():
        steps = TorchSteps(training, stage)
        batches: Sequence[Tensor] = [None] * FULL_BATCHES if full else steps.order.split(size)
        step, setting = _compiled(allowance, steps, batches[0], stage)

        def all_steps() -> Tensor:
            return torch.stack([(step if full or len(rows) == size else steps.step)(rows) for rows in batches])

        replay = stage.record(all_steps, 1)

    def run() -> None:
        if not full:
            torch.randperm(len(training.x), out=steps.order)
        replay()

    def first_losses() -> Array:
        steps.restart()
        steps.order.copy_(torch.from_numpy(first_order(training)))
        return stage.fetch(replay())

    gpu_bytes = stage.memory_bytes() - bytes_before
    return PeerRun(run, FULL_BATCHES if full else 1, stage.synchronise, first_losses, setting, gpu_bytes)


def _compiled(
    allowance: Allowance, steps: TorchSteps, rows: Tensor | None, stage: TorchStage
) -> tuple[Callable[[Tensor], Tensor], str]:
    """The step, compiled for this batch size if the allowance permits, else uncompiled."""
    try:
        with allowance.spend("torch.compile"), contextlib.redirect_stderr(io.StringIO()):
            stage.torch._dynamo.reset()  # graphs of earlier runs count against a limit
            run = stage.torch.compile(steps.step, dynamic=False, fullgraph=True)
            for _ in range(2):
                run(rows)
            stage.synchronise()
    except UnavailableError:
        return steps.step, "not compiled: the time budget is spent"
    return run, "compiled"


def torch_eager(job: EpochJob, stage: TorchStage) -> PeerRun:
    """Autograd and an optimiser, one step at a time."""
    training = job.training
    _set_precision(stage, training)
    run = Autograd(training, form="fused", compiled=False, device=str(stage.device))
    losses = [run.step(x, y).item() for x, y in itertools.islice(run.batches(), VERIFIED_STEPS)]
    return PeerRun(run.run, training.options.epochs, stage.synchronise, lambda: np.array(losses), "fused SGD")


# -- JAX ---------------------------------------------------------------------------------------------------


def jax_scan(allowance: Allowance, compiled: dict[Any, Any], job: EpochJob, stage: TorchStage) -> PeerRun:
    """Epochs as one call. In fp32 the gemms are true fp32, as for every engine; JAX's default is TF32.

    compiled  steps compiled by earlier jobs, reused over other rows
    """
    jax, training = load_jax(), job.training
    from_dlpack, n, full = importlib.import_module("jax.dlpack").from_dlpack, len(training.x), is_full(training)
    x, y = (from_dlpack(stage.torch.from_numpy(array).to(stage.device)) for array in (training.x, training.y))
    layers, w, b = torch_layers(stage.torch, training.net(0))
    # Copied into JAX's own memory: if the address changed between calls, XLA could not update its graph.
    first = [tuple(jax.numpy.asarray(weight.numpy()) for weight in pair) for pair in zip(w, b, strict=True)]
    zeros = [tuple(jax.numpy.zeros_like(weight) for weight in pair) for pair in first]
    activations = tuple(layer.activation for layer in layers)
    key = training.options, activations
    if key not in compiled:
        compiled[key] = jax.jit(functools.partial(jax_steps, jax, training.options, activations))
    epochs = compiled[key]
    permutation = jax.jit(lambda i: jax.random.permutation(jax.random.fold_in(jax.random.key(0), i), n))
    state, epoch = [(first, zeros)], itertools.count()

    def call(order: Any) -> Any:
        with jax.default_matmul_precision("tensorfloat32" if job.precision == "tf32" else "highest"):
            state[0], losses = epochs(state[0], x, y, order)
        return losses

    def run() -> None:
        call(None if full else permutation(next(epoch)))

    order = None if full else jax.numpy.asarray(first_order(training).astype(np.int32))
    with allowance.spend("jax"):
        losses = np.asarray(call(order))  # compiles
    return PeerRun(
        run, FULL_BATCHES if full else 1, lambda: jax.block_until_ready(state[0]), lambda: losses, "lax.scan"
    )


def jax_steps(jax: Any, options: TrainOptions, activations: Sequence[type | None], state: Any, x: Any, y: Any,
              order: Any) -> tuple[Any, Any]:  # fmt: skip
    """SGD over an epoch's batches, in this order, or FULL_BATCHES times over all rows; the new state and all losses.

    state  weights and velocities, a pair (weight, bias) per layer
    """
    numpy, size = jax.numpy, options.batch_size

    def loss_of(weights: Any, x: Any, y: Any) -> Any:
        h = x
        for (w, b), activation in zip(weights, activations, strict=True):
            h = h @ w.T + b
            h = jax.nn.sigmoid(h) if activation is Sigmoid else numpy.maximum(h, 0) if activation is ReLU else h
        if options.loss == "cross_entropy":
            return -numpy.mean(numpy.take_along_axis(jax.nn.log_softmax(h), y[:, None], 1))
        return 0.5 * numpy.sum((h - y) ** 2)

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        weights, velocities = state
        loss, gradients = jax.value_and_grad(loss_of)(weights, *batch)
        if options.momentum:
            velocities = jax.tree.map(lambda v, g: options.momentum * v + g, velocities, gradients)
            gradients = velocities
        return (jax.tree.map(lambda w, g: w - options.lr * g, weights, gradients), velocities), loss

    if order is None:
        state, losses = jax.lax.scan(lambda state, _: step(state, (x, y)), state, None, length=FULL_BATCHES)
        return state, losses
    x, y = x[order], y[order]  # once: cheaper than a gather per step
    batches = len(x) // size
    full = (rows[: batches * size].reshape(batches, size, *rows.shape[1:]) for rows in (x, y))
    state, losses = jax.lax.scan(step, state, tuple(full))
    if len(x) > batches * size:
        state, last = step(state, (x[batches * size :], y[batches * size :]))
        losses = numpy.append(losses, last)
    return state, losses
