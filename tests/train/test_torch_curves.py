"""The losses of `fit` are those of a torch loop: same weights, same batches, a loss for every step."""

from __future__ import annotations

import copy

import numpy as np
import pytest

import onchip
from onchip.train.order import epoch_order

torch = pytest.importorskip("torch")
nn = torch.nn

ROWS, BATCH, EPOCHS, SEED = 240, 32, 5, 3  # 40 steps; the last batch of an epoch is short


def lenet():
    return nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 3), nn.ReLU(), nn.AvgPool2d(2),
        nn.Flatten(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 5),
    )  # fmt: skip


def lenet_with_norms():
    return nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2, bias=False), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 3, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.AvgPool2d(2),
        nn.Flatten(), nn.Linear(64, 5),
    )  # fmt: skip


OPTIMISERS = {
    "momentum": (
        {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-3},
        lambda weights: torch.optim.SGD(weights, lr=0.05, momentum=0.9, weight_decay=1e-3),
    ),
    "adamw": (
        {"optimiser": "adamw", "lr": 1e-2, "weight_decay": 0.05},
        lambda weights: torch.optim.AdamW(weights, lr=1e-2, weight_decay=0.05),
    ),
}


def data():
    """Images (ROWS, 1, 12, 12) of five classes, noisy."""
    rng = np.random.default_rng(0)
    classes = rng.integers(0, 5, ROWS)
    patterns = rng.standard_normal((5, 1, 12, 12))
    return (patterns[classes] + rng.standard_normal((ROWS, 1, 12, 12))).astype(np.float32), classes


def train_in_torch(module, optimiser, x, y, dtype):
    """Train a copy of the module in this dtype; return it, and the loss of every step before its update."""
    module = copy.deepcopy(module).to(dtype).train()
    step, losses = optimiser(module.parameters()), []
    x, y = torch.from_numpy(x).to(dtype), torch.from_numpy(y)
    for epoch in range(EPOCHS):
        order = epoch_order(ROWS, SEED, epoch)
        for start in range(0, ROWS, BATCH):
            batch = torch.from_numpy(order[start : start + BATCH])
            loss = nn.functional.cross_entropy(module(x[batch]), y[batch])
            step.zero_grad()
            loss.backward()
            step.step()
            losses.append(loss.item())
    return module, np.array(losses)


@pytest.mark.parametrize("optimiser", OPTIMISERS)
@pytest.mark.parametrize("build", [lenet, lenet_with_norms])
def test_losses_are_torchs(build, optimiser):
    torch.manual_seed(0)
    module, (x, y), (options, in_torch) = build(), data(), OPTIMISERS[optimiser]
    true, truth = train_in_torch(module, in_torch, x, y, torch.float64)
    naive, theirs = train_in_torch(module, in_torch, x, y, torch.float32)
    net = onchip.load(module, x[:2])
    result = onchip.fit(net, x, y, batch_size=BATCH, epochs=EPOCHS, seed=SEED, device="cpu", **options)
    assert len(truth) == len(result.losses) == 40
    assert truth[-1] < truth[0] / 4  # it learns
    # An error grows from step to step: compare the largest so far.
    error = np.maximum.accumulate(np.abs(result.losses - truth))
    allowed = 2 * np.maximum.accumulate(np.abs(theirs - truth)) + 4 * np.finfo(np.float32).eps * truth[0]
    assert (error <= allowed).all(), f"step {(error / allowed).argmax()}: {(error / allowed).max():.2f} of the allowed"
    trained = onchip.to_torch(module, result).state_dict()
    for name in net.weights:  # running statistics included
        off, others = (float((of[name] - true.state_dict()[name]).abs().max()) for of in (trained, naive.state_dict()))
        assert off <= 4 * others + 1e-6, name
