"""Shared by the training kernels of every device: supported networks, per-step optimiser values, and state by name."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from onchip.errors import FormatError
from onchip.kernels.chain import Chain, find_chain, why_not_float32
from onchip.kernels.pointwise import TRAINED
from onchip.network.graph import Node, TrainedStep
from onchip.network.layers import LeakyReLU, Linear, Reshape
from onchip.network.recipe import Array, Recipe
from onchip.network.training import TrainingStep

BETA1, BETA2, EPS = 0.9, 0.999, 1e-8  # of Adam
# The state arrays per optimiser.
STATE_NAMES = {"sgd": (), "momentum": ("velocity",), "adam": ("mean", "square"), "adamw": ("mean", "square")}
AVERAGE = "average"  # of weights, in the state: with `ema`
MLP_LOSSES = ("cross_entropy", "half_sse", "mse")  # of kernels that run whole steps
CLIP_EPS = 1e-6  # added to a norm before division, as in torch
STEP_FLOATS = 8  # per-step optimiser values
MAX_EPOCHS, _MAX_QUEUED_ROWS = 32, 1 << 21  # limits of what is queued on a device at a time
_MAX_STEPS = 2**62  # counting on from there does not overflow
CHUNK = 1 << 18  # elements converted to bytes at a time: they stay in a core's cache


class BatchRanks(Protocol):
    """Processes that share the rows of every batch of one run."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def exchange(self, arrays: Sequence[Array], cuts: Sequence[int]) -> None:
        """Rows cuts[r] .. cuts[r + 1] - 1 of each array are rank r's; afterwards every rank has all of them."""
        ...


class SharedData:
    """Data that concurrent runs over the same rows share on a device; the first caller creates an entry."""

    def __init__(self, runs: int = 1, ranks: BatchRanks | None = None) -> None:
        """runs   number of runs: a single one uses all CPU threads, several use one each, their calling thread
        ranks  for a single run: those that share its batches
        """
        self.runs, self.ranks = runs, ranks
        self._entries: dict[object, Any] = {}
        self._lock = threading.Lock()

    def get(self, key: object, make: Callable[[], Any]) -> Any:
        with self._lock:
            if key not in self._entries:
                self._entries[key] = make()
            return self._entries[key]


@dataclass(frozen=True, eq=False)
class Epochs:
    """The next epochs of a run: orders of rows of x, trained in sequence, batch by batch.

    orders  of one length, at most `epochs_at_once` of them. They must not change during the run: rows in the same order
            every epoch are copied to a device once
    """

    orders: Sequence[Array]
    lrs: Array  # (orders, steps): the learning rate of every step
    momentum: float = 0.0
    decay: float = 0.0
    steps_done: int = 0  # of the run before these


# Per order: each step's loss before its update, and its correct predictions; of several outputs (steps, outputs), the
# loss of each.
Trained = list[tuple[Array, Array]]


@dataclass(frozen=True)
class StepPhase:
    """A phase of a step inside a kernel that runs whole steps, on several threads or blocks."""

    name: str
    us: float  # per step: the mean of the threads or blocks; the phases add up to the step
    most_us: float  # of the thread or block that takes longest


@dataclass(frozen=True)
class LaunchTime:
    """The launches of one kernel in a step; on the CPU its calls."""

    kernel: str
    count: float  # launches per step; a kernel that runs several steps at once has less than one
    us: float  # per step
    estimate_us: float = 0.0  # per step, if this network trains alone; 0: not estimated
    phases: tuple[StepPhase, ...] = ()  # of a kernel that runs whole steps, in the order in which they run
    threads: tuple[float, ...] = ()  # on the CPU: the share of the step in which each thread ran tasks
    profiled_us: float = 0.0  # on a GPU: per step, in the launch that counted the phases


def why_not_trained(step: TrainedStep, chain: Chain | None) -> str:
    """ "" if kernels can run the step of a network, which is this chain; else the reason."""
    net, loss = step.network, step.how.loss
    if loss not in MLP_LOSSES:
        return f"trains with {', '.join(MLP_LOSSES)}, not {loss}"
    if step.how.optimiser not in STATE_NAMES:
        return f"trains with {', '.join(STATE_NAMES)}, not {step.how.optimiser}"
    if isinstance(step.decays, Mapping):
        return "decays all weights alike, not by name"
    if step.how.beta1 != BETA1:
        return f"trains with Adam's beta1 {BETA1}, not {step.how.beta1:g}"
    if step.how.ema:
        return "keeps no average of the weights (ema)"
    if chain is None or len(chain.nodes) != len(net.nodes):
        rest = net.nodes[0 if chain is None else len(chain.nodes) :]
        node = next((node for node in rest if not isinstance(node.layer, (Linear, Reshape, *TRAINED))), rest[0])
        between = " or ".join(kind.__name__ for kind in TRAINED)
        why = f"layer {_named(node)} does not fit"
        return f"trains only a whole MLP chain, Linear layers with {between} between them: {why}"
    if chain.normaliser:
        node = next(node for node in net.nodes if node.layer.kind == chain.normaliser)
        return f"{loss} expects the inputs of layer {_named(node)}: train without it"
    if chain.vectors != 1:
        return f"one vector per row, got {chain.vectors} in layer {_named(net.nodes[0])}"
    if loss == "cross_entropy" and chain.layers[-1].activation is not None:
        node = next(node for node in reversed(net.nodes) if isinstance(node.layer, TRAINED))
        return f"cross_entropy expects logits, got layer {_named(node)} after the last Linear"
    for node in net.nodes:
        if isinstance(node.layer, LeakyReLU) and node.layer.slope < 0:
            return f"layer {_named(node)} has a slope below 0: its output does not determine the sign of its input"
    names = [name for layer in chain.layers for name in (layer.weight, layer.bias) if name is not None]
    if frozen := [name for name in names if name in step.frozen or isinstance(net.weights[name], Recipe)]:
        return f"trains all weights, and '{frozen[0]}' is not to be trained"
    twice = next((name for name in names if names.count(name) > 1), "")
    return f"every layer must have its own weights, got '{twice}' twice" if twice else why_not_float32(net, chain)


def trained_chain(step: TrainedStep) -> Chain | None:
    """The network as a chain that kernels can train; None if it is not one."""
    chain = find_chain(step.network, 0, TRAINED)
    return None if why_not_trained(step, chain) else chain


def _named(node: Node) -> str:
    return f"'{node.name}' ({node.layer.kind})"


def why_unsupported(step: TrainingStep) -> str:
    """ "" if the step uses no optional feature; else the first, for kernels that support none."""
    extras = {"label smoothing": step.label_smoothing, "row weighting": step.is_weighted, "clipping": step.clip_norm}
    return next((f"{name} is not supported" for name, requested in extras.items() if requested), "")


def bytes_of(x: Array) -> tuple[Array, float] | None:
    """Bytes and a scale such that x is bytes * scale, if they exist: pixels then take a quarter of the memory.

    x  float32: every element is k / 255, correctly rounded (the scale is 1 / 255), or every element is k (the scale is
       1), for integers k from 0 to 255. The search stops soon after the first other one.
    """
    if x.dtype != np.float32:
        return None
    flat, pixels = np.ascontiguousarray(x).reshape(-1), np.empty(x.size, np.uint8)
    for levels in (255, 1):
        if _all_are_bytes(flat, levels, pixels):
            return pixels.reshape(x.shape), 1 / levels
    return None


def _all_are_bytes(x: Array, levels: int, pixels: Array) -> bool:
    found_other = threading.Event()

    def convert(first: int) -> None:
        chunk = slice(first, first + CHUNK)
        if not (found_other.is_set() or _to_bytes(x[chunk], levels, pixels[chunk])):
            found_other.set()

    with ThreadPoolExecutor() as pool:
        list(pool.map(convert, range(0, x.size, CHUNK)))
    return not found_other.is_set()


def _to_bytes(x: Array, levels: int, pixels: Array) -> bool:
    """Whether x is k / levels for bytes k, which are written to `pixels`."""
    if not (x.min() >= 0 and x.max() <= 255 / levels):  # False for NaN
        return False
    pixels[:] = x * np.float32(levels) + np.float32(0.5)
    return np.array_equal(pixels.astype(np.float32) / np.float32(levels), x)


def epochs_at_once(rows: int, batch: int) -> int:
    """The number of epochs of `rows` rows that are queued on a device together."""
    return max(1, min(MAX_EPOCHS, _MAX_QUEUED_ROWS // (-(-rows // batch) * batch)))


def weights_of_batches(order: Array, batch: int, row_weights: Array | None) -> Array:
    """(steps,) float64: the rows of each batch of an order, or the sum of their weights."""
    if row_weights is not None and len(order):
        return np.add.reduceat(row_weights[order].astype(np.float64), np.arange(0, len(order), batch))
    weights = np.full(-(-len(order) // batch), float(batch))  # three times as fast as np.diff, for short epochs
    weights[-1:] -= -len(order) % batch
    return weights


def mean_losses(loss: str, sums: Array, weights: Array) -> Array:
    """Losses of batches from the sums over their rows: weighted means, 0 for a batch without weight."""
    return sums if loss == "half_sse" else np.divide(sums, weights, out=np.zeros_like(sums), where=weights > 0)


def per_step_values(
    training: TrainingStep, N: int, weights: Array, done: int, lrs: Array, momentum: float, decay: float
) -> Array:  # fmt: skip
    """(steps, STEP_FLOATS) float32: lr, scale, root, keep, decay and clip per step, N outputs per row.

    A gradient is a sum over rows; `scale` turns it into the mean that the loss uses. lr and root include Adam's bias
    corrections. `keep` is the fraction of momentum's velocity that a step keeps, or of Adam's w, which adamw's decay
    shrinks.

    weights  weights_of_batches
    done     steps before these
    lrs      (steps,)
    """
    values = np.zeros((len(weights), STEP_FLOATS), np.float32)
    values[:, 0], values[:, 1:3], values[:, 3:6] = lrs, 1, (momentum, decay, training.clip_norm)
    if training.loss != "half_sse":
        top, outputs = (2.0, N) if training.loss == "mse" else (1.0, 1)
        values[:, 1] = mean_losses(training.loss, np.full(len(weights), top), weights * outputs)
    if training.optimiser in ("adam", "adamw"):
        step = np.arange(done + 1, done + 1 + len(weights), dtype=np.float64)
        values[:, 0] = values[:, 0].astype(np.float64) / (1.0 - BETA1**step)
        values[:, 2] = 1.0 / np.sqrt(1.0 - BETA2**step)
        values[:, 3], values[:, 4] = (1 - lrs * decay, 0) if training.optimiser == "adamw" else (1, decay)
    return values


def check_restored(
    weights: Mapping[str, Array], state: Mapping[str, Array], like: Mapping[str, Array], state_like: Mapping[str, Array]
) -> None:
    """FormatError if they are not the weights and the state of a run with arrays like these."""
    if "steps" not in state:
        raise FormatError("not an optimiser state", got=", ".join(state) or "nothing", expected="steps, ...",
                          hint="state=result.state, of a run of the same network and optimiser")  # fmt: skip
    for name, array in like.items():
        _check_like(weights, name, array)
    if strange := next((name for name in state if name not in state_like), ""):
        expected, hint = ", ".join(state_like), "the same optimiser, or no state"
        raise FormatError("the state is from another optimiser", got=strange, expected=expected, hint=hint)
    for name, array in state_like.items():
        _check_like(state, name, array)
        low = 0 if name == "steps" or name.startswith("square:") else -np.inf
        high = _MAX_STEPS if name == "steps" else np.inf
        if not ((state[name] >= low) & (state[name] <= high)).all():  # False for NaN
            got = f"from {state[name].min()} to {state[name].max()}"
            raise FormatError(f"invalid optimiser state '{name}'", got=got, expected=f"{low} to {high}")


def _check_like(arrays: Mapping[str, Array], name: str, like: Array) -> None:
    array = arrays.get(name)
    if not isinstance(array, np.ndarray) or array.shape != like.shape or array.dtype != like.dtype:
        got = f"{array.dtype.name}{list(array.shape)}" if isinstance(array, np.ndarray) else type(array).__name__
        expected = f"{like.dtype.name}{list(like.shape)}"
        raise FormatError(f"cannot continue from '{name}'", got="nothing" if array is None else got, expected=expected)
