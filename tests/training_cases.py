"""Small trainings of every kind, the documented formulas carried out one at a time, and the two held together."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from checks import random_mlp, rows
from emulated_cuda import copy_headers, kernel_of
from onchip.kernels import cuda, reference
from onchip.kernels.cuda import KERNELS
from onchip.kernels.cuda.common.costs import H200 as H200_COSTS
from onchip.kernels.cuda.common.program import Program, Steps
from onchip.kernels.cuda.train.large_batch import launches as mlp_train
from onchip.kernels.cuda.train.large_batch import three_launch as mlp_train_three_launch
from onchip.train.loop import fit
from onchip.train.many import fit_runs
from onchip.train.options import TrainOptions
from onchip.train.order import epoch_order, hold_out
from onchip.train.row_weights import weights_of_rows
from onchip.train.schedule import lrs_of


def case(*widths, n=64, options=None, **training):
    """A network, its data and how it is trained."""
    net, x = random_mlp(*widths, **(options or {})), rows(n, widths[0])
    rng = np.random.default_rng(5)
    if training.get("loss", "cross_entropy") == "cross_entropy":
        return net, x, rng.integers(0, widths[-1], n), training
    return net, x, rng.random((n, widths[-1]), dtype=np.float32), training


def rising(n):
    """Weights of rows; an eighth of the rows have none."""
    return np.maximum(0, np.arange(n) - n // 8).astype(np.float32) / n


def extras(n):
    """All that a loss of classes and its gradients may have, for n rows."""
    return {
        "label_smoothing": 0.2, "class_weight": "balanced", "sample_weight": rising(n), "clip_norm": 0.5,
        "batch_size": 16,
    }  # fmt: skip


SIGMOIDS = {"activation": "Sigmoid", "output": "Sigmoid"}
CASES = {
    "digits": lambda: case(784, 320, 160, 10, n=320, batch_size=64),
    "odd widths": lambda: case(
        20, 13, 7, 3, n=100, options={"activation": "Tanh"}, batch_size=16, lr=0.05, momentum=0.9
    ),
    "one layer": lambda: case(5, 4, n=30, batch_size=7, lr=0.1),
    "batch 1": lambda: case(6, 5, 4, n=9, batch_size=1, lr=0.05),
    "full batch, past a block": lambda: case(
        33, 40, 17, 5, n=1500, options=SIGMOIDS, loss="half_sse", batch_size=10_000, lr=1e-3, momentum=0.5
    ),
    "rows as they come": lambda: case(
        12, 9, 2, n=1300, options=SIGMOIDS, loss="half_sse", batch_size=1299, lr=1e-3, shuffle=False
    ),
    "no bias": lambda: case(9, 8, 7, 6, n=50, options={"bias": False}, loss="half_sse", batch_size=20, lr=1e-3),
    "ten layers": lambda: case(8, 9, 10, 11, 12, 13, 12, 11, 10, 9, 3, batch_size=32, lr=0.01, momentum=0.9),
    "mean of squares": lambda: case(7, 19, 3, n=50, options={"activation": "Tanh"}, loss="mse", batch_size=16, lr=0.1),
    "leaky": lambda: case(11, 21, 13, 4, n=70, options={"activation": "LeakyReLU"}, batch_size=32, lr=0.05),
    "decay": lambda: case(10, 17, 5, batch_size=16, lr=0.1, weight_decay=0.05),
    "decay and momentum": lambda: case(10, 17, 5, batch_size=16, lr=0.05, weight_decay=0.05, momentum=0.8),
    "adam": lambda: case(23, 37, 6, n=100, batch_size=16, lr=0.01, optimiser="adam"),
    "adam, past a block": lambda: case(
        13, 29, 2, n=2500, loss="mse", batch_size=1200, lr=0.01, optimiser="adam", weight_decay=0.1
    ),
    "steps down": lambda: case(10, 17, 5, batch_size=16, lr=0.2, schedule="step", step_every=1, step_factor=0.5),
    "cosine": lambda: case(10, 17, 5, batch_size=16, lr=0.2, schedule="cosine", momentum=0.5),
    "one cycle": lambda: case(10, 17, 5, batch_size=16, lr=0.2, schedule="one_cycle", momentum=0.5),
    "warm-up": lambda: case(10, 17, 5, batch_size=16, lr=0.05, optimiser="adamw", weight_decay=0.3, warmup=1.5),
    "adamw": lambda: case(23, 37, 6, n=100, batch_size=16, lr=0.01, optimiser="adamw", weight_decay=0.3),
    "weights, smoothing, clipped": lambda: case(10, 17, 5, n=90, lr=0.1, validation=0.25, **extras(90)),
    "weights, clipped, past a block": lambda: case(
        13, 29, 2, n=1500, loss="mse", lr=0.1, momentum=0.5, clip_norm=0.05, batch_size=1200, sample_weight=rising(1500)
    ),
    "a share held back": lambda: case(10, 17, 5, n=90, batch_size=16, lr=0.1, validation=0.25),
}
EPOCHS = 3


def reference_curve(net, x, y, seed, dtype, training, epochs=EPOCHS, turn=0):
    """Every step's loss, every epoch's validation loss, and the network: the documented formulas, one at a time.

    turn  not 0: the rows of each batch in another order, whose sums round in other ways
    """
    training = dict(training)
    given = training.pop("sample_weight", None)
    options = TrainOptions(**training, epochs=epochs, seed=seed)
    weights = weights_of_rows(options.class_weight, y, given, np.arange(len(x)), net.output.row_size)
    kept, losses, held_losses = {}, [], []
    train, held = hold_out(len(x), options.validation, seed)
    for epoch in range(epochs):
        order = train[epoch_order(len(train), seed, epoch)] if options.shuffle else train
        starts = range(0, len(order), options.batch_size)
        for start, lr in zip(starts, lrs_of(options, epoch, len(starts)), strict=True):
            batch = order[start : start + options.batch_size]
            batch = np.random.default_rng(turn).permutation(batch) if turn else batch
            of_rows = None if weights is None else weights[batch]
            value, gradients = reference.loss_and_gradients(
                net, x[batch], y[batch], options.loss, dtype, of_rows, options.label_smoothing
            )
            losses.append(value)
            if options.clip_norm:
                gradients = reference.clip_gradients(gradients, options.clip_norm)
            if options.optimiser in ("adam", "adamw"):
                how = lr, len(losses), options.weight_decay, options.optimiser == "adamw"
                net = reference.adam_step(net, kept, gradients, *how)
            else:
                net = reference.sgd_step(
                    net, kept, gradients, lr, options.momentum, options.weight_decay, options.nesterov
                )
        if len(held):
            of_rows = None if weights is None else weights[held]
            made = reference.forward(net, x[held], dtype)
            held_losses.append(reference.batch_loss(options.loss, made, y[held], of_rows, options.label_smoothing)[0])
    return np.array(losses), np.array(held_losses), net


def assert_follows_reference(net, x, y, training, device):
    """Train for EPOCHS: losses and weights are as near to float64's as those of a naive run in float32, twice over."""
    result = fit(net, x, y, epochs=EPOCHS, seed=7, device=device, **training)
    truth, held, trained = reference_curve(net, x, y, 7, "float64", training)
    naive, _, naive_net = reference_curve(net, x, y, 7, "float32", training)
    eps = np.finfo(np.float32).eps
    assert result.losses.shape == truth.shape
    assert np.abs(result.losses - truth).max() <= 2 * np.abs(naive - truth).max() + 8 * eps * np.abs(truth).max()
    assert np.abs(truth[0] - truth[-1]) > 0  # the curve moves, so following it means something
    for weight, w in trained.weights.items():
        allowed = 3 * np.abs(naive_net.weights[weight] - w).max() + 8 * eps * np.abs(w).max()
        assert np.abs(result.network.weights[weight] - w).max() <= allowed, weight
    told = [epoch.validation_loss for epoch in result.history]
    assert told == (pytest.approx(held, rel=1e-5) if training.get("validation") else [None] * EPOCHS)
    return result


def assert_bits_of_single_runs(runs, x, y):
    """Runs on a GPU side by side: every result is that of `fit` with the same rows and options."""
    for run, result in zip(runs, fit_runs(runs, x, y, device="cuda"), strict=True):
        part = slice(None) if run.rows is None else run.rows
        alone = fit(run.net, x[part], y[part], device="cuda", **dataclasses.asdict(run.options))
        assert np.array_equal(result.losses, alone.losses)
        assert result.best_epoch == alone.best_epoch
        for name, w in alone.network.weights.items():
            assert np.array_equal(result.network.weights[name], w), name
        for name, array in alone.state.items():
            assert np.array_equal(result.state[name], array), name


# -- GPU kernels that hand numbers to each other -----------------------------------------------------------------------


def pixels(n, D, seed=0):
    return (np.random.default_rng(seed).integers(0, 256, (n, D)) / np.float32(255)).astype(np.float32)


PIXEL_CASES = {
    "digits": lambda: case(70, 40, 20, 4, n=150, batch_size=64, lr=0.1),
    "four layers, adam": lambda: case(20, 21, 17, 9, 5, n=70, batch_size=30, lr=0.01, optimiser="adam"),
    "two layers, 32 outputs": lambda: case(12, 75, 32, n=50, batch_size=16, lr=0.05),
    "no bias, decay": lambda: case(
        16, 24, 3, n=40, options={"bias": False, "activation": "Sigmoid"}, loss="half_sse", batch_size=16, lr=1e-2,
        weight_decay=0.1,
    ),
    "many rows": lambda: case(9, 8, 7, 5, n=600, batch_size=530, lr=0.05),
    "many pixels": lambda: case(1200, 9, 5, n=40, batch_size=16, lr=0.05),
    "momentum, batch 1": lambda: case(
        6, 5, 4, n=9, options={"activation": "Tanh"}, loss="mse", batch_size=1, momentum=0.5
    ),
    "weights, smoothing": lambda: case(
        10, 17, 5, n=90, lr=0.1, label_smoothing=0.2, class_weight="balanced", sample_weight=rising(90), batch_size=32
    ),
}  # fmt: skip


def case_of_pixels(name):
    """Whose rows are bytes."""
    net, x, y, training = PIXEL_CASES[name]()
    return net, pixels(len(x), x.shape[1]), y, training


def train_only_by(monkeypatch, name):
    """The training kernel of this name, whatever the planner would prefer."""
    (kept,) = (kernel for kernel in KERNELS if kernel.name == name)
    training = ("mlp_train", "mlp_train_three_launch", "mlp_train_resident", "mlp_train_layer_parallel")
    others = (kernel for kernel in cuda.KERNELS if kernel.name not in training)
    monkeypatch.setattr(cuda, "KERNELS", (kept, *others))


def take_bytes(monkeypatch):
    """Rows that are bytes as such, however few a batch has."""
    monkeypatch.setattr(mlp_train, "MIN_BATCH", 1)


def take_rows(monkeypatch):
    """Narrow layers in one launch, however few rows a batch has."""
    take_bytes(monkeypatch)
    monkeypatch.setattr(mlp_train, "MIN_ROWS", 0)


def let_separate_launches_take(monkeypatch, clocks):
    """More than one launch for all layers but the first, which is chosen if it takes less."""
    stream = dataclasses.replace(H200_COSTS.train_stream, separate_clocks=clocks)
    table = dataclasses.replace(H200_COSTS, train_stream=stream)
    monkeypatch.setattr(mlp_train, "costs_of", lambda device: table)


def stream_everything(monkeypatch):
    """However few rows a batch has, and however narrow the layers are."""
    take_bytes(monkeypatch)
    monkeypatch.setattr(mlp_train, "MIN_ROWS", 1 << 30)
    let_separate_launches_take(monkeypatch, 1e12)
    train_only_by(monkeypatch, "mlp_train")


def take_any_batch(monkeypatch):
    """In three launches: small batches are soon emulated."""
    monkeypatch.setattr(mlp_train_three_launch, "MIN_BATCH", 1)
    monkeypatch.setattr(mlp_train_three_launch, "MAX_BATCH", 1 << 20)
    train_only_by(monkeypatch, "mlp_train_three_launch")


def all_ways_apart(monkeypatch):
    """A launch for each product, of bytes too."""
    take_bytes(monkeypatch)
    monkeypatch.setattr(mlp_train, "MIN_ROWS", 1 << 30)
    let_separate_launches_take(monkeypatch, -1e12)
    train_only_by(monkeypatch, "mlp_train")


def only_by(name):
    return lambda monkeypatch: train_only_by(monkeypatch, name)


# Every way to train on a GPU, by what is to be patched; a kernel that does not take a network refuses it.
WAYS = {
    "as planned": lambda monkeypatch: None,
    "launches": only_by("mlp_train"),
    "bytes": all_ways_apart,
    "rows": lambda monkeypatch: (take_rows(monkeypatch), train_only_by(monkeypatch, "mlp_train")),
    "stream": stream_everything,
    "three": take_any_batch,
    "resident": only_by("mlp_train_resident"),
    "by layers": only_by("mlp_train_layer_parallel"),
}


def delay_at_random(monkeypatch, lowering_class):
    """Blocks come late, wherever they hand something to others."""
    launch_all = lowering_class.steps

    def launch_delayed(self, count):
        (launch,) = launch_all(self, count).launches
        program = dataclasses.replace(launch.program, options=("-DRANDOM_DELAYS",))
        return Steps((dataclasses.replace(launch, program=program),))

    monkeypatch.setattr(lowering_class, "steps", launch_delayed)


def leave_out_a_block(monkeypatch, lowering_class):
    """Launched without the last one, which the others wait for."""
    launch_all = lowering_class.steps

    def launch_fewer(self, count):
        (launch,) = launch_all(self, count).launches
        config = dataclasses.replace(launch.config, grid=(launch.config.grid[0] - 1, 1, 1))
        return Steps((dataclasses.replace(launch, config=config),))

    monkeypatch.setattr(lowering_class, "steps", launch_fewer)


def shared_bytes_of(source, room, folder):
    """What bytes() of this type says, compiled from a CUDA file in another folder."""
    copy_headers(folder)
    told = folder / "tell.cu"
    told.write_text(
        f"{source.read_text()}\ntemplate <class R>\n__global__ void tell(int* to) {{ *to = R::bytes(); }}\n"
    )
    found = np.zeros(1, np.int32)
    kernel_of(Program(told, f"tell<{room}>")).run(1, 1, (found.ctypes.data,))
    return found[0]


def assert_same_bits(one, other):
    assert np.array_equal(one.losses, other.losses)
    for name, w in one.network.weights.items():
        assert np.array_equal(other.network.weights[name], w), name
