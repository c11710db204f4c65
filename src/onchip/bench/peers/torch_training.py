"""torch as a peer in training, in the fastest equivalent forms we know.

All rows are in one tensor, batches are gathered by index, and the loop never synchronises on a value. "torch eager" is
the usual code: autograd and an optimiser; "torch.compile" is the same with the loss and its gradient compiled. "torch
by hand" works without autograd: gradients are gemms into preallocated arrays, and for plain SGD the gemm does the
update.
"""

from __future__ import annotations

import abc
import functools
import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from onchip.bench.cases.training import TrainingCase, percent
from onchip.bench.frame import Ready, UnavailableError
from onchip.bench.peers.cpu import explained, load_torch
from onchip.bench.peers.framework import framework
from onchip.measure.truth import Verdict
from onchip.network.graph import Network
from onchip.network.layers import Linear, ReLU, Sigmoid
from onchip.network.recipe import Array, materialise
from onchip.train.schedule import lrs_of

Tensor = Any
SLACK = 100.0  # for a peer's error: rounding may flip the sign of a ReLU's input, and change a row's gradient
_TRIAL_ROWS, _TRIAL_STEPS, _TRIALS = 16_384, 64, 3
CHUNKS = (512, 2_048, 16_384)  # rows per chunk of a large batch, by hand


class TorchRun(abc.ABC):
    """A training run of a job, with rows and weights on a torch device."""

    def __init__(self, job: TrainingCase, seed: int = 0, device: str = "cpu") -> None:
        self.torch = load_torch(job.threads)
        self.job, self.seed, self.device = job, seed, device
        self.x, self.y = (self.torch.from_numpy(array).to(device) for array in (job.x, job.y))

    @abc.abstractmethod
    def step(self, x: Tensor, y: Tensor) -> Tensor:
        """One update; returns the batch's loss before it."""

    @abc.abstractmethod
    def weights(self) -> dict[str, Tensor]:
        """Weights by their name in the network."""

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        size = self.job.options.batch_size
        if not self.job.options.shuffle:
            for _ in range(self.job.options.epochs):
                yield from zip(self.x.split(size), self.y.split(size), strict=True)
            return
        for batch in self.job.batches(self.seed):
            rows = self.torch.from_numpy(batch).to(self.device)
            yield self.x[rows], self.y[rows]

    def run(self, steps: int | None = None) -> None:
        for x, y in itertools.islice(self.batches(), steps):
            self.step(x, y)

    def network(self) -> Network:
        return self.job.net(self.seed).replace(
            weights={name: w.detach().numpy().copy() for name, w in self.weights().items()}
        )

    def check(self) -> Verdict:
        losses = [self.step(x, y).item() for x, y in self.batches()]
        return self.job.verify(losses, self.network(), SLACK)

    def accuracy(self, x_test: Array, y_test: Array) -> float:
        module = framework("torch_network").torch_module(self.network())
        with self.torch.inference_mode():
            return percent(module(self.torch.from_numpy(x_test)).numpy(), y_test)


class Autograd(TorchRun):
    """form  "foreach" or "fused": how torch's optimiser runs"""

    def __init__(self, job: TrainingCase, seed: int = 0, *, form: str, compiled: bool, device: str = "cpu") -> None:
        super().__init__(job, seed, device)
        torch, options, steps = self.torch, job.options, -(-len(job.x) // job.options.batch_size)
        self.module = framework("torch_network").torch_module(job.net(seed), trains=True).train().to(device)
        if options.optimiser == "adam":
            self.optimiser = torch.optim.Adam(self.module.parameters(), lr=options.lr, **{form: True})
        else:
            self.optimiser = torch.optim.SGD(
                self.module.parameters(), lr=options.lr, momentum=options.momentum, **{form: True}
            )
        self._lrs = itertools.cycle(lr for epoch in range(options.epochs) for lr in lrs_of(options, epoch, steps))
        criteria = {
            "cross_entropy": torch.nn.functional.cross_entropy,
            "half_sse": lambda out, y: 0.5 * (out - y).square().sum(),
        }
        criterion = criteria[options.loss]

        def loss_of(x: Tensor, y: Tensor) -> Tensor:
            return criterion(self.module(x), y)

        self.loss_of = loss_of
        if compiled:
            # The backward pass is compiled too; compiling the optimiser as well gained nothing.
            torch._dynamo.reset()  # graphs of earlier runs count against a limit
            self.loss_of = torch.compile(loss_of, dynamic=False, fullgraph=True)

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        self.optimiser.zero_grad(set_to_none=True)
        loss = self.loss_of(x, y)
        loss.backward()
        self.optimiser.param_groups[0]["lr"] = float(next(self._lrs))
        self.optimiser.step()
        return loss

    def weights(self) -> dict[str, Tensor]:
        names = [name for node in self.job.net(0).nodes for name in node.weights.values()]
        return dict(zip(names, self.module.parameters(), strict=True))


class ByHand(TorchRun):
    """Linear layers with biases, ReLU and Sigmoid; a batch runs in chunks of `chunk` rows (None: all)."""

    def __init__(self, job: TrainingCase, seed: int = 0, *, chunk: int | None) -> None:
        super().__init__(job, seed)
        self.chunk = chunk
        self.layers, self.w, self.b = torch_layers(self.torch, job.net(seed))
        self.vw, self.vb = ([self.torch.zeros_like(w) for w in weights] for weights in (self.w, self.b))
        self._buffers: dict[int, tuple[list[Tensor], list[Tensor], Tensor]] = {}

    def weights(self) -> dict[str, Tensor]:
        named = {}
        for layer, w, b in zip(self.layers, self.w, self.b, strict=True):
            named[layer.weight], named[layer.bias] = w, b
        return named

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        options, size = self.job.options, len(x)
        chunk = self.chunk or size
        scale = 1.0 / size if options.loss == "cross_entropy" else 1.0
        with self.torch.inference_mode():
            if chunk >= size and not options.momentum:  # a gradient that is used once needs no buffer
                return self._accumulate(x, y, self.w, self.b, -options.lr, scale)
            for v in (*self.vw, *self.vb):
                v.mul_(options.momentum)
            losses = [
                self._accumulate(x[i : i + chunk], y[i : i + chunk], self.vw, self.vb, 1.0, scale)
                for i in range(0, size, chunk)
            ]
            for w, v in zip((*self.w, *self.b), (*self.vw, *self.vb), strict=True):
                w.add_(v, alpha=-options.lr)
            return sum(losses)

    def _accumulate(
        self, x: Tensor, y: Tensor, to_w: list[Tensor], to_b: list[Tensor], factor: float, scale: float
    ) -> Any:
        """Add `factor` times the gradient of scale * (the rows' losses) to to_w and to_b; return the loss."""
        torch, (h, dz, minus_one) = self.torch, self._arrays(len(x))
        values = [x, *h]
        for i, layer in enumerate(self.layers):
            torch.addmm(self.b[i], values[i], self.w[i].t(), out=h[i])
            if layer.activation is not None:
                (torch.sigmoid_ if layer.activation is Sigmoid else torch.relu_)(h[i])
        if self.job.options.loss == "cross_entropy":
            logp = torch.log_softmax(h[-1], 1)
            loss = torch.nn.functional.nll_loss(logp, y, reduction="sum") * scale
            torch.exp(logp, out=dz[-1]).scatter_add_(1, y[:, None], minus_one)
        else:
            torch.sub(h[-1], y, out=dz[-1])
            loss = dz[-1].square().sum() * (0.5 * scale)
        for i in reversed(range(len(self.layers))):
            self._multiply_derivative(self.layers[i].activation, dz[i], h[i])
            if i > 0:
                torch.mm(dz[i], self.w[i], out=dz[i - 1])  # before the update of w
            to_w[i].addmm_(dz[i].t(), values[i], alpha=factor * scale)
            to_b[i].add_(dz[i].sum(0), alpha=factor * scale)
        return loss

    def _multiply_derivative(self, activation: type | None, dz: Tensor, h: Tensor) -> None:
        """dz *= the activation's derivative, computed from its output h."""
        aten = self.torch.ops.aten
        if activation is Sigmoid:
            aten.sigmoid_backward.grad_input(dz, h, grad_input=dz)
        elif activation is ReLU:
            aten.threshold_backward.grad_input(dz, h, 0, grad_input=dz)

    def _arrays(self, rows: int) -> tuple[list[Tensor], list[Tensor], Tensor]:
        """Buffers for `rows` rows: each layer's output, the gradient of each activation's input, and -1s."""
        if rows not in self._buffers:
            h, dz = ([self.torch.empty(rows, len(w)) for w in self.w] for _ in range(2))
            self._buffers[rows] = (h, dz, self.torch.full((rows, 1), -1.0))
        return self._buffers[rows]


class Dense(NamedTuple):
    weight: str  # names in the network
    bias: str
    activation: type | None  # after the gemm, or None


def torch_layers(torch: Any, net: Network) -> tuple[list[Dense], list[Tensor], list[Tensor]]:
    """Every layer, its weight (D_out, D_in) and its bias; copies, as the network's are read-only."""
    layers: list[Dense] = []
    for node in net.nodes:
        if isinstance(node.layer, Linear) and "bias" in node.weights:
            layers.append(Dense(node.weights["weight"], node.weights["bias"], None))
        elif isinstance(node.layer, ReLU | Sigmoid) and layers and layers[-1].activation is None:
            layers[-1] = layers[-1]._replace(activation=type(node.layer))
        else:
            raise UnavailableError(f"torch by hand does not support {node.layer.kind}")

    def tensor(name: str) -> Tensor:
        return torch.from_numpy(materialise(name, net.weights).copy())

    return layers, [tensor(layer.weight) for layer in layers], [tensor(layer.bias) for layer in layers]


# -- cases -------------------------------------------------------------------------------------------------

Make = Callable[..., TorchRun]  # (job, seed)


def autograd_forms(job: TrainingCase) -> dict[str, dict[str, Make]]:
    """Engine -> its variants, for any network."""
    name = "Adam" if job.options.optimiser == "adam" else "SGD"
    return {
        engine: {
            f"{form} {name}": functools.partial(Autograd, form=form, compiled=compiled) for form in ("foreach", "fused")
        }
        for engine, compiled in (("torch eager", False), ("torch.compile", True))
    }


def torch_forms(job: TrainingCase) -> dict[str, dict[str, Make]]:
    """Engine -> its variants; the fastest is measured, and its name is part of the setting."""
    forms: dict[str, dict[str, Make]] = autograd_forms(job)
    forms["torch by hand"] = {"whole batches": functools.partial(ByHand, chunk=None)}
    for chunk in CHUNKS:
        if chunk < min(job.options.batch_size, len(job.x)):
            forms["torch by hand"][f"chunks of {chunk} rows"] = functools.partial(ByHand, chunk=chunk)
    return forms


def torch_runs(job: TrainingCase) -> dict[str, Callable[[], Ready]]:
    """The function that prepares each torch form for a job."""
    return {name: functools.partial(torch_run, job, name, forms) for name, forms in torch_forms(job).items()}


def torch_run(job: TrainingCase, name: str, forms: Mapping[str, Make]) -> Ready:
    with explained(name):
        variant, run = fastest_form(job, forms)
    return Ready(run.run, lambda: forms[variant](job.few, 0).check(), job.setting(variant))


def torch_accuracy(
    job: TrainingCase, name: str, forms: Mapping[str, Make], x_test: Array, y_test: Array, seeds: int
) -> Ready:
    """All seeds in sequence; the scores are their test accuracies in percent."""
    with explained(name):
        variant, _ = fastest_form(job, forms)
    scores: list[float] = []

    def run() -> None:
        for seed in range(seeds):
            torch_run = forms[variant](job, seed)
            torch_run.run()
            scores.append(torch_run.accuracy(x_test, y_test))

    def check() -> Verdict:
        return forms[variant](job.few, 0).check()

    return Ready(run, check, job.setting(variant), lambda: scores)


def fastest_form(job: TrainingCase, forms: Mapping[str, Make]) -> tuple[str, TorchRun]:
    """The form that runs the first steps fastest; interleaved, best of a few tries."""
    runs = {name: make(job, 0) for name, make in forms.items()}
    if len(runs) == 1:
        return next(iter(runs.items()))
    steps = min(max(1, _TRIAL_ROWS // job.options.batch_size), _TRIAL_STEPS)
    seconds = dict.fromkeys(runs, float("inf"))
    for trial in range(1 + _TRIALS):
        for name, run in runs.items():
            start = time.perf_counter()
            run.run(steps)
            if trial > 0:  # the first one compiles and allocates
                seconds[name] = min(seconds[name], time.perf_counter() - start)
    best = min(seconds, key=lambda name: seconds[name])
    return best, runs[best]
