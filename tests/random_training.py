"""Random trainings from a seed, and the judge that holds what comes of them against the float64 reference.

`python tests/random_training.py FIRST LAST [--device cpu] [--precision fp32]` prints those that are wrong, of the seeds
from FIRST to before LAST. On a GPU every kernel that trains takes its turn, whatever the planner would prefer, and of
what it refuses mlp_train, which refuses nothing; with `--device emulated` they run on the host.
"""

from __future__ import annotations

import argparse
import dataclasses
import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import repeat
from typing import Any, NoReturn

import numpy as np
import pytest

from emulated_engine import emulate_device
from onchip.errors import PlanError
from onchip.kernels import reference
from onchip.network.build import make_layer, sequential
from onchip.network.graph import Network
from onchip.network.layers import Linear
from onchip.network.types import BATCH, TensorType
from onchip.plan.device import H200
from onchip.runtime.cuda import devices
from onchip.train.layered import LayeredRun
from onchip.train.loop import fit
from onchip.train.many import Run, fit_runs
from onchip.train.options import TrainOptions
from onchip.train.training_run import FitResult
from training_cases import WAYS, reference_curve

MAX_STEPS, MAX_ROWS = 12, 400  # of a run: a few steps amplify little of what rounding does
# Of what naive runs are off. Adam divides a gradient by its size: where it cancels, rounding says how far weights go.
FACTORS = {"sgd": 3, "adam": 16, "adamw": 16}
NAIVE_RUNS, NUDGED_RUNS = 4, 16  # of a yardstick, each with the rows of its batches in another order
ROUNDING = {"tf32": 2**-7, "fp16": 2**-7, "bf16": 2**-4}  # of a loss and a weight, where factors have fewer bits
EPS = float(np.finfo(np.float32).eps)
WIDTHS = (1, 2, 3, 5, 7, 8, 9, 13, 16, 17, 24, 28, 31, 32, 33, 40, 47, 56, 63, 64, 65, 72, 100, 130)
BATCHES = (1, 2, 3, 7, 8, 15, 16, 17, 30, 31, 32, 33, 48, 63, 64, 65, 100, 127, 128, 129, 130, 200, 256, 257, 300)


@dataclass(frozen=True, eq=False)
class Training:
    """A network, its data, how it is trained, and by which kernels of a GPU."""

    net: Network
    x: np.ndarray
    y: np.ndarray
    options: TrainOptions
    sample_weight: np.ndarray | None
    way: str  # of WAYS
    units: int  # multiprocessors, where they are emulated

    def __str__(self) -> str:
        layers = "-".join(
            str(self.net.types[node.name].row_size) if isinstance(node.layer, Linear) else node.layer.kind
            for node in self.net.nodes
        )
        plain = TrainOptions()
        chosen = {
            field.name: value for field in dataclasses.fields(plain)
            if (value := getattr(self.options, field.name)) != getattr(plain, field.name)
        }  # fmt: skip
        weighted = "" if self.sample_weight is None else ", with weights"
        return f"{self.net.input.row_size}-{layers}, {len(self.x)} rows{weighted}, {chosen}, {self.way}, {self.units}"


def random_training(seed: int, precision: str = "fp32") -> Training:
    """One to five layers; the same on every machine."""
    rng = np.random.default_rng((seed, 17))

    def pick(options: Sequence[Any]) -> Any:
        return options[int(rng.integers(len(options)))]

    way = pick(tuple(WAYS))
    of_bytes, of_few = way not in ("as planned", "launches", "resident"), way in ("resident", "by layers")
    batch = pick(BATCHES[: BATCHES.index(64) + 1] if of_few else BATCHES)
    epochs = pick((1, 2, 3))
    n = min(batch * pick((1, 1, 2, 3)) + pick((-1, 0, 0, 1, 5)), MAX_ROWS, batch * (MAX_STEPS // epochs))
    n = max(n, pick((1, 2, 4)))
    loss = pick(("cross_entropy", "cross_entropy", "half_sse", "mse"))
    widths = [pick(WIDTHS) for _ in range(pick((2, 3, 3, 4, 4, 4, 5, 6)))]
    widths[-1] = pick((1, 2, 3, 4, 7, 10, 31, 32, 33))
    net = _network(widths, loss, pick, rng)
    x = rng.standard_normal((n, widths[0]), dtype=np.float32)
    if of_bytes or pick((True, False)):  # pixels, or small whole numbers
        levels, step = pick(((256, 255), (256, 255), (2, 1), (17, 16)))
        x = rng.integers(0, levels, x.shape).astype(np.float32) / np.float32(step)
    has_classes = loss == "cross_entropy"
    y = rng.integers(0, widths[-1], n) if has_classes else rng.random((n, widths[-1]), dtype=np.float32)
    optimiser = pick(("sgd", "sgd", "momentum", "adam", "adamw"))
    step = 0.003 if optimiser.startswith("adam") else 1e-4 if loss == "half_sse" else 0.02
    has_more = not of_few or pick((True, False, False, False))  # than a plain loss and plain gradients
    options = TrainOptions(
        loss=loss, optimiser="sgd" if optimiser == "momentum" else optimiser, lr=step * pick((1, 2)),
        momentum=0.9 if optimiser == "momentum" else 0.0, weight_decay=pick((0.0, 0.0, 0.1)),
        clip_norm=pick((0.0, 0.0, 0.0, 0.5)) * has_more, schedule=pick(("constant", "step", "cosine")), step_every=1,
        step_factor=0.5, label_smoothing=pick((0.0, 0.0, 0.1)) * (has_classes and has_more), batch_size=batch,
        epochs=epochs, class_weight="balanced" if has_classes and has_more and pick((True, False, False)) else None,
        validation=0.25 if n >= 8 and pick((True, False, False, False)) else 0.0, shuffle=pick((True, True, False)),
        seed=seed, precision=precision,
    )  # fmt: skip
    weights = rng.integers(0, 4, n).astype(np.float32) if has_more and pick((True, False, False)) else None
    if weights is not None:
        weights[rng.integers(n)] += 1
    return Training(net, x, y, options, weights, way, pick((6, 7, 20, 132)))


def _network(widths: Sequence[int], loss: str, pick: Any, rng: np.random.Generator) -> Network:
    """Layers with an activation of their own, or none, and with a bias or without."""
    layers: list[tuple[str, Any]] = []
    weights: dict[str, Any] = {}
    usual, has_bias = pick(("ReLU", "LeakyReLU", "Sigmoid", "Tanh")), pick((True, True, False))
    for i in range(1, len(widths)):
        D, N = widths[i - 1], widths[i]
        weights[f"fc{i}.weight"] = (rng.standard_normal((N, D)) / np.sqrt(D)).astype(np.float32)
        if has_bias != pick((False, False, False, True)):
            weights[f"fc{i}.bias"] = (rng.standard_normal(N) / 4).astype(np.float32)
        layers.append((f"fc{i}", Linear()))
        kind = pick((usual, usual, usual, None, "ReLU", "LeakyReLU", "Sigmoid", "Tanh"))
        if kind is not None and (i < len(widths) - 1 or loss != "cross_entropy"):
            slope = {"slope": pick((0.01, 0.2, 0.0))} if kind == "LeakyReLU" else {}
            layers.append((f"{kind.lower()}{i}", make_layer(kind, **slope)))
    return sequential(TensorType((BATCH, widths[0])), layers, weights)


# -- the judge -------------------------------------------------------------------------------------------------


def judge_training(seed: int, device: str = "cpu", precision: str = "fp32") -> str:
    """What is wrong with a random training on a device, and how to see it again; "" if nothing is."""
    training = random_training(seed, precision)
    try:
        wrong = _faults_by(training, device, training.way)
    except PlanError:  # that kernel does not take it
        wrong = _faults_by(training, device, "launches")
    if not wrong:
        return ""
    again = f"python tests/random_training.py {seed} {seed + 1} --device {device} --precision {precision}"
    return "\n".join([f"random training {seed} is wrong; to see it again: {again}", str(training), *wrong])


def _faults_by(training: Training, device: str, way: str) -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        if device != "cpu":
            go_by(patch, training, way, device == "emulated")
        return faults(training, "cpu" if device == "cpu" else "cuda")


def go_by(patch: pytest.MonkeyPatch, training: Training, way: str, is_emulated: bool) -> None:
    """On a GPU, one of WAYS."""
    if is_emulated:
        emulate_device(patch)
        patch.setattr(devices, "probe", lambda: ([dataclasses.replace(H200, units=training.units)], ""))
    WAYS[way](patch)
    patch.setattr(LayeredRun, "plan", refuse)


def refuse(*_: object) -> NoReturn:
    raise PlanError("a training by layers")


def faults(training: Training, device: str) -> list[str]:
    given = {"sample_weight": training.sample_weight, "device": device}
    result = fit(training.net, training.x, training.y, **given, **dataclasses.asdict(training.options))
    wrong = _errors(training, result)
    again = fit(training.net, training.x, training.y, **given, **dataclasses.asdict(training.options), debug=True)
    wrong += _unequal_bits(result, again, "a step at a time")
    if device == "cpu":
        one = fit(training.net, training.x, training.y, **given, **dataclasses.asdict(training.options), threads=1)
        return wrong + _unequal_bits(result, one, "with one thread")
    if training.options.seed % 2:
        return wrong
    other = dataclasses.replace(training.options, seed=training.options.seed + 1, lr=training.options.lr / 3, epochs=1)
    runs = [Run(training.net, other), Run(training.net, training.options), Run(training.net, other)]
    together = fit_runs(runs, training.x, training.y, **given)
    return wrong + (
        _unequal_bits(result, got, "beside others") if isinstance(got := together[1], FitResult) else [str(got)]
    )


def _errors(training: Training, result: FitResult) -> list[str]:
    """What is off by more than naive runs are, some times over."""
    wrong = _errors_beside(training, result, [training.net] * NAIVE_RUNS)
    if wrong:  # where a unit's sign is rounding's to say, or a gradient cancels: weights a rounding apart tell
        wrong = _errors_beside(training, result, [_nudged(training.net, seed) for seed in range(NUDGED_RUNS)])
    return wrong + _wrong_accuracy(training, result)


def _nudged(net: Network, seed: int) -> Network:
    """The network with each weight up to two roundings of float32 away."""
    rng = np.random.default_rng(seed)
    nudges = {name: 1 + EPS * rng.integers(-1, 2, w.shape) for name, w in net.weights.items()}
    return net.replace(weights={name: (w * nudges[name]).astype(np.float32) for name, w in net.weights.items()})


def _errors_beside(training: Training, result: FitResult, nets: Sequence[Network]) -> list[str]:
    """nets  of the naive runs"""
    o = training.options
    curve = {"epochs": o.epochs, "seed": o.seed, "precision": o.precision}
    how = {name: value for name, value in dataclasses.asdict(o).items() if name not in curve}
    how["sample_weight"] = training.sample_weight
    data = training.x, training.y, o.seed
    truth, held, trained = reference_curve(training.net, *data, "float64", how, o.epochs)
    naive = [reference_curve(net, *data, "float32", how, o.epochs, turn) for turn, net in enumerate(nets)]
    told = np.array([epoch.validation_loss for epoch in result.history if epoch.validation_loss is not None])
    pairs = [("losses", result.losses, truth, [each[0] for each in naive])]
    pairs += [("validation losses", told, held, [each[1] for each in naive])]
    pairs += [(name, result.network.weights[name], w, [each[2].weights[name] for each in naive])
              for name, w in trained.weights.items()]  # fmt: skip
    wrong = []
    for what, got, exact, yardsticks in pairs:
        if got.shape != exact.shape:
            wrong.append(f"{what}: shape {got.shape}, expected {exact.shape}")
            continue
        if not exact.size:
            continue
        scale = np.abs(exact).max()
        off = max(np.abs(each - exact).max() for each in yardsticks)
        allowed = FACTORS[o.optimiser] * off + 16 * EPS * scale + ROUNDING.get(o.precision, 0.0) * max(scale, 1.0)
        if what in trained.weights and o.precision != "fp32" and o.optimiser != "sgd":
            allowed += 2 * o.lr * len(truth)  # Adam's steps are as long as lr, whichever way rounding sends them
        error = np.abs(got - exact).max()
        if not error <= allowed:
            wrong.append(f"{what}: off by {error:.3g}, allowed {allowed:.3g}: naive {off:.3g} of {scale:.3g}")
    return wrong


def _wrong_accuracy(training: Training, result: FitResult) -> list[str]:
    """Of the first epoch of a single batch: then the first weights judge every row."""
    o, told = training.options, result.history[0].accuracy
    if o.loss != "cross_entropy" or o.validation or o.batch_size < len(training.x) or o.precision != "fp32":
        return []
    logits = np.sort(reference.forward(training.net, training.x, "float64"), axis=1)
    best = reference.forward(training.net, training.x, "float64").argmax(axis=1) == training.y
    is_clear = logits.shape[1] == 1 or logits[:, -1] - logits[:, -2] > 1e-4
    least, most = int((best & is_clear).sum()), int((best | ~np.broadcast_to(is_clear, best.shape)).sum())
    found = round(told * len(training.x))
    return [] if least <= found <= most else [f"accuracy: {found} rows, expected {least} to {most}"]


def _unequal_bits(one: FitResult, other: FitResult, what: str) -> list[str]:
    if one.losses.tobytes() != other.losses.tobytes():
        return [f"{what}: other bits of losses"]
    names = [name for name, w in one.network.weights.items() if w.tobytes() != other.network.weights[name].tobytes()]
    return [f"{what}: other bits of {name}" for name in names]


def judge_all(seeds: Sequence[int], device: str, precision: str) -> list[str]:
    """Verdicts that are not "": in processes, as compiling is most of it."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), spawn) as pool:
        verdicts = pool.map(judge_training, seeds, repeat(device), repeat(precision), chunksize=4)
        return [verdict for verdict in verdicts if verdict]


def main() -> None:
    parser = argparse.ArgumentParser(description="Random trainings that are wrong.")
    parser.add_argument("first", type=int)
    parser.add_argument("last", type=int)
    parser.add_argument("--device", default="cpu", help="cpu, cuda, or emulated: a GPU's kernels on the host")
    parser.add_argument("--precision", default="fp32")
    args = parser.parse_args()
    wrong = judge_all(range(args.first, args.last), args.device, args.precision)
    print("\n\n".join([*wrong, f"{args.last - args.first} judged, {len(wrong)} wrong"]))
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
