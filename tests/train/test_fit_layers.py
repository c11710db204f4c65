"""`fit` of networks that no kernel trains as a whole: their steps are planned layer by layer."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import onchip
from emulated_cuda import needs_gxx
from emulated_engine import emulate_device
from onchip.errors import InputError, KernelError
from onchip.kernels import reference
from onchip.network.graph import Network
from onchip.network.layers import Dropout
from onchip.plan.gradient.step import VALUES
from onchip.plan.gradient.training_form import DRAW
from onchip.runtime.check import FACTOR, ULP, ULPS
from onchip.train.many import Run, fit_runs
from onchip.train.options import TrainOptions
from onchip.train.order import epoch_order
from onchip.train.schedule import lrs_of
from onchip.train.step import step_of
from row_steps import images, sentences

N = 37
SEED = 3
DEVICES = [
    pytest.param("cpu"), pytest.param("emulated", marks=needs_gxx), pytest.param("gpu", marks=pytest.mark.gpu),
]  # fmt: skip


@pytest.fixture(params=DEVICES)
def device(request, monkeypatch):
    if request.param == "emulated":
        emulate_device(monkeypatch)
    return "cpu" if request.param == "cpu" else "cuda"


def data(net: Network, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    shape = (N, *net.input.row_shape)
    x = rng.integers(0, 11, shape) if "int" in net.input.dtype else rng.standard_normal(shape).astype(np.float32)
    return x, rng.integers(0, 3, N)


OPTIONS = {"lr": 0.05, "batch_size": 8, "epochs": 3, "seed": SEED}
CASES = {
    "momentum, clipped": (images, {"momentum": 0.9, "clip_norm": 0.5}),
    "nesterov, warm-up": (sentences, {"momentum": 0.9, "nesterov": True, "warmup": 1.5, "schedule": "cosine"}),
    "frozen": (images, {"frozen": "c.*,n.mean", "momentum": 0.5}),
    "adamw": (images, {"optimiser": "adamw", "weight_decay": 0.1, "label_smoothing": 0.1, "lr": 0.01}),
    "ids": (sentences, {}),
    "one batch of all rows": (images, {"batch_size": 100, "schedule": "cosine"}),
    "batches of one row": (sentences, {"batch_size": 1, "optimiser": "adam", "lr": 0.01}),
    "weighted rows": (images, {"class_weight": [0.5, 2, 1], "sample_weight": np.arange(N) % 4}),
    "decay by name": (images, {"weight_decay": {"*.bias": 0.0, "*": 0.1}, "optimiser": "adam", "lr": 0.01}),
    "rows in order": (sentences, {"shuffle": False, "weight_decay": 0.01}),
}  # fmt: skip


def float64_losses(net: Network, x: np.ndarray, y: np.ndarray, dtype: str, **options) -> np.ndarray:
    """The loss of every step, by the reference."""
    sample_weight = options.pop("sample_weight", None)
    o = TrainOptions(**options)
    how = o.step
    step = step_of(net, how, o.weight_decay, o.frozen)
    state, losses, done, B = {name: np.asarray(step.weights[name]) for name in step.state}, [], 0, min(o.batch_size, N)
    row_weights = np.ones(N) if sample_weight is None else np.asarray(sample_weight, np.float64)
    if o.class_weight is not None:
        row_weights = row_weights * np.array(o.class_weight)[y]
    for epoch in range(o.epochs):
        lrs = lrs_of(o, epoch, -(-N // B))
        order = epoch_order(N, o.seed, epoch) if o.shuffle else np.arange(N)
        for begin in range(0, N, B):
            rows = order[begin : begin + B]
            now = [lrs[begin // B], o.step_decay, o.momentum, 1 - 0.9 ** (done + 1), 1 - 0.999 ** (done + 1)]
            state[VALUES] = np.array(now, np.float32)
            if DRAW in state:
                state[DRAW] = np.array([o.seed, done])
            weights = row_weights[rows]
            share = weights / weights.sum() if weights.sum() else weights
            loss, state = reference.run_step(step, (x[rows], y[rows], share), state, dtype)
            losses.append(loss.item())
            done += 1
    return np.array(losses)


@pytest.mark.parametrize("case", CASES)
def test_losses_are_those_of_the_reference(device, case):
    make, options = CASES[case]
    net, options = make(), OPTIONS | options
    x, y = data(net)
    result = onchip.fit(net, x, y, device=device, **options)
    exact, naive = (float64_losses(net, x, y, dtype, **options) for dtype in ("float64", "float32"))
    allowed = FACTOR * np.abs(naive - exact).max() + ULPS * ULP["fp32"] * np.abs(exact).max()
    assert np.abs(result.losses - exact).max() <= allowed
    assert result.losses[0] != result.losses[-1]


def test_validation_evaluates_as_inference(device):
    net = images()
    x, y = data(net)
    options = OPTIONS | {"validation_data": (x[:11], y[:11]), "sample_weight": np.linspace(1, 2, N)}
    result = onchip.fit(net, x, y, device=device, **options)
    logits = reference.forward(result.network, x[:11])
    losses = np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(11), y[:11]]
    last = result.history[-1]
    assert last.validation_loss == pytest.approx(losses.mean(), rel=1e-5)
    assert last.validation_accuracy == np.mean(logits.argmax(axis=1) == y[:11])
    alone = onchip.fit(net, x, y, device=device, **OPTIONS | {"sample_weight": np.linspace(1, 2, N)})
    assert alone.losses.tobytes() == result.losses.tobytes()


def test_early_stopping_keeps_the_best_weights(device):
    net = images()
    x, y = data(net)
    options = OPTIONS | {"lr": 0.2, "epochs": 12, "patience": 2, "validation": 0.3}
    result = onchip.fit(net, x, y, device=device, **options)
    losses = [epoch.validation_loss for epoch in result.history]
    assert result.best_epoch == 1 + int(np.argmin(losses))
    again = onchip.fit(net, x, y, device=device, **options | {"epochs": result.best_epoch, "patience": 0})
    assert all(w.tobytes() == result.network.weights[name].tobytes() for name, w in again.network.weights.items())


def test_averages_are_the_result_and_are_evaluated(device):
    net = images()
    x, y = data(net)
    options = OPTIONS | {"validation_data": (x[:11], y[:11]), "epochs": 2, "device": device}
    plain, result = (onchip.fit(net, x, y, ema=ema, **options) for ema in (0.0, 0.9))
    assert plain.losses.tobytes() == result.losses.tobytes()
    first = onchip.fit(net, x, y, ema=0.9, **options | {"epochs": 1, "batch_size": N})  # one step
    after = onchip.fit(net, x, y, **options | {"epochs": 1, "batch_size": N}).network.weights["a.weight"]
    expected = 0.9 * net.weights["a.weight"] + 0.1 * after
    np.testing.assert_allclose(first.network.weights["a.weight"], expected, atol=1e-6)
    logits = reference.forward(result.network, x[:11])
    losses = np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(11), y[:11]]
    assert result.history[-1].validation_loss == pytest.approx(losses.mean(), rel=1e-5)
    assert result.history[-1].validation_loss != plain.history[-1].validation_loss
    assert (result.state["average:a.weight"] == result.network.weights["a.weight"]).all()


@pytest.mark.parametrize("optimiser", ["sgd", "adamw"])
def test_a_killed_run_resumes_with_the_same_bits(device, optimiser, tmp_path):
    """Dropouts, running statistics, moments and the number of the step."""
    net = images()
    x, y = data(net)
    options = OPTIONS | {
        "optimiser": optimiser,
        "lr": 0.01,
        "epochs": 4,
        "device": device,
        "validation": 0.2,
        "ema": 0.5,
    }
    whole = onchip.fit(net, x, y, **options)

    def end(epoch):
        if epoch.epoch == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        onchip.fit(net, x, y, **options, checkpoint=tmp_path, checkpoint_every=0, on_epoch=end)
    resumed = onchip.fit(net, x, y, **options, checkpoint=tmp_path, resume=True)
    assert resumed.losses.tobytes() == whole.losses.tobytes()
    assert all(w.tobytes() == whole.network.weights[name].tobytes() for name, w in resumed.network.weights.items())
    assert resumed.state.keys() == whole.state.keys()


def test_the_state_of_a_result_continues_it(device):
    net = sentences()
    x, y = data(net)
    options = OPTIONS | {"momentum": 0.9, "shuffle": False, "device": device}
    whole = onchip.fit(net, x, y, **options | {"epochs": 4})
    half = onchip.fit(net, x, y, **options | {"epochs": 2})
    rest = onchip.fit(half.network, x, y, **options | {"epochs": 2}, state=half.state)
    assert np.concatenate([half.losses, rest.losses]).tobytes() == whole.losses.tobytes()


def test_many_runs_have_the_bits_of_single_ones(device):
    net = images()
    x, y = data(net)
    runs = [Run(net, TrainOptions(**OPTIONS | {"seed": seed, "validation": 0.2})) for seed in range(3)]
    for run, result in zip(runs, fit_runs(runs, x, y, device=device), strict=True):
        alone = onchip.fit(net, x, y, device=device, **dataclasses.asdict(run.options))
        assert alone.losses.tobytes() == result.losses.tobytes()
        assert alone.history[-1].validation_loss == result.history[-1].validation_loss


def test_a_dropout_drops_by_the_seed(device):
    net = images()
    x, y = data(net)
    without = net.replace(
        nodes=[dataclasses.replace(node, layer=Dropout(0.0)) if isinstance(node.layer, Dropout) else node
               for node in net.nodes]
    )  # fmt: skip
    options = OPTIONS | {"shuffle": False, "epochs": 1, "device": device}
    losses = [
        onchip.fit(of, x, y, **options | {"seed": seed}).losses for of, seed in ((net, 0), (net, 1), (without, 0))
    ]
    assert len({each.tobytes() for each in losses}) == 3


def test_bad_ids_are_refused_before_the_first_step():
    net = sentences()
    x, y = data(net)
    x[30, 2] = 11
    with pytest.raises(InputError, match="row 30, position 2: id 11"):
        onchip.fit(net, x, y, device="cpu")
    x[30, 2] = 10
    narrow = onchip.fit(net, x.astype(np.uint8), y, device="cpu", **OPTIONS)
    assert narrow.losses.tobytes() == onchip.fit(net, x, y, device="cpu", **OPTIONS).losses.tobytes()


def test_debug_names_the_layer_of_the_first_bad_value():
    net = images()
    x, y = data(net)
    with pytest.raises(KernelError, match="not finite"):
        onchip.fit(net, x * np.float32(1e30), y, device="cpu", debug=True, **OPTIONS | {"lr": 1e30})


def test_the_plan_says_why_no_kernel_runs_the_whole_step(device):
    net = images()
    plan = onchip.fit(net, *data(net), device=device, **OPTIONS | {"epochs": 1}).plan
    assert any("layer 'c' (Conv2d) does not fit" in refusal.why for refusal in plan.refusals)
