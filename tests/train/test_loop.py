"""Training: loss curves against the float64 reference, same bits, and errors before any work."""

import pickle

import numpy as np
import pytest

from checks import rows
from emulated_cuda import needs_gxx
from emulated_engine import emulate_device
from onchip.errors import FormatError, InputError, KernelError, OnchipError, ShapeError
from onchip.kernels import reference
from onchip.kernels.cpu.train import mlp as mlp_train
from onchip.kernels.training import SharedData
from onchip.network.build import mlp, sequential
from onchip.network.graph import Network, Node
from onchip.network.layers import LeakyReLU, Linear, ReLU
from onchip.network.types import TensorType
from onchip.runtime.cpu.backend import core_count
from onchip.train import loop, training_run
from onchip.train.loop import fit
from onchip.train.many import Run, fit_runs
from onchip.train.options import TrainOptions
from onchip.train.order import epoch_order, hold_out
from onchip.train.row_weights import weights_of_rows
from onchip.train.together import start_runs
from onchip.train.training_run import TrainingRun, plan_run
from training_cases import CASES, SIGMOIDS, assert_follows_reference, case


@pytest.mark.parametrize("name", CASES)
def test_loss_curve_and_weights_follow_the_reference(name):
    assert_follows_reference(*CASES[name](), device="cpu")


@pytest.mark.parametrize("name", sorted(CASES.keys() - {"one cycle", "warm-up"}))  # their rates: test_schedule.py
def test_loss_curve_follows_torch_in_the_same_order(name):
    torch = pytest.importorskip("torch")
    from onchip.bench.peers.frameworks.torch_network import torch_module

    net, x, y, training = CASES[name]()
    result = fit(net, x, y, device="cpu", epochs=1, seed=3, **training)
    given = training.pop("sample_weight", None)
    options = TrainOptions(**training, epochs=1, seed=3)
    weights = weights_of_rows(options.class_weight, y, given, np.arange(len(x)), net.output.row_size)
    weights = np.ones(len(x), np.float32) if weights is None else weights
    module = torch_module(net).train()
    if options.optimiser in ("adam", "adamw"):
        made = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[options.optimiser]
        optimiser = made(module.parameters(), lr=options.lr, weight_decay=options.weight_decay)
    else:
        optimiser = torch.optim.SGD(
            module.parameters(), lr=options.lr, momentum=options.momentum, weight_decay=options.weight_decay
        )
    row_losses = {
        "cross_entropy": torch.nn.CrossEntropyLoss(label_smoothing=options.label_smoothing, reduction="none"),
        "half_sse": lambda z, t: 0.5 * ((z - t) ** 2).sum(dim=1),
        "mse": lambda z, t: torch.nn.MSELoss(reduction="none")(z, t).mean(dim=1),
    }[options.loss]
    train, _ = hold_out(len(x), options.validation, 3)
    order = train[epoch_order(len(train), 3, 0)] if options.shuffle else train
    losses = []
    for start in range(0, len(order), options.batch_size):
        batch = order[start : start + options.batch_size]
        optimiser.zero_grad()
        of_rows = torch.from_numpy(weights[batch])
        loss = row_losses(module(torch.from_numpy(x[batch])), torch.from_numpy(y[batch])) @ of_rows
        loss = loss if options.loss == "half_sse" else loss / of_rows.sum()
        loss.backward()
        if options.clip_norm:
            torch.nn.utils.clip_grad_norm_(module.parameters(), options.clip_norm)
        optimiser.step()
        losses.append(loss.item())
    assert result.losses == pytest.approx(losses, rel=3e-5)


@pytest.mark.parametrize("given", [{"label_smoothing": 0.3}, {"class_weight": [0.5, 0, 2, 7]}])
def test_smoothing_and_class_weights_are_those_of_torch(given):
    torch = pytest.importorskip("torch")
    net, x, y, training = CASES["one layer"]()
    training["batch_size"] = len(x)
    result = fit(net, x, y, device="cpu", epochs=2, validation=0.5, **training, **given)
    told = {"label_smoothing": 0.3} if "label_smoothing" in given else {"weight": torch.tensor([0.5, 0, 2, 7])}
    criterion = torch.nn.CrossEntropyLoss(**told)
    train, held = hold_out(len(x), 0.5, 0)
    for part, network, loss in (
        (train, net, result.losses[0]), (held, result.network, result.history[-1].validation_loss),
    ):  # fmt: skip
        logits = torch.from_numpy(reference.forward(network, x[part], "float32"))
        assert loss == pytest.approx(criterion(logits, torch.from_numpy(y[part])).item(), rel=1e-6)
    assert result.epoch_losses[0] == result.losses[0]


def test_an_epoch_s_loss_is_the_mean_over_its_rows_by_weight():
    net, x, y, training = CASES["weights, smoothing, clipped"]()
    training |= {"lr": 1e-30, "validation": 0.0}  # weights stay, so every row order has the same mean
    one, other = (fit(net, x, y, device="cpu", epochs=1, **training | {"batch_size": b}) for b in (len(x), 16))
    assert other.epoch_losses == pytest.approx(one.epoch_losses, rel=1e-6)


def test_a_batch_of_rows_without_weight_teaches_nothing():
    net, x, y, _ = CASES["one layer"]()
    weights = np.where(np.arange(len(x)) < 7, 0, 1.0)
    result = fit(net, x, y, device="cpu", epochs=1, batch_size=7, shuffle=False, sample_weight=weights)
    behind = fit(net, x[7:], y[7:], device="cpu", epochs=1, batch_size=7, shuffle=False)
    assert np.array_equal(result.losses, [0.0, *behind.losses])
    for name, w in behind.network.weights.items():
        assert np.array_equal(result.network.weights[name], w), name


def test_a_result_prints_a_line_and_can_be_pickled():
    net, x, y, training = CASES["odd widths"]()
    result = fit(net, x, y, device="cpu", epochs=2, **training)
    assert repr(result).startswith("FitResult(2 epochs, loss ")
    assert len(repr(result)) < 120
    assert result._repr_html_().count("<tr>") == 3
    twin = pickle.loads(pickle.dumps(result))
    assert np.array_equal(twin.losses, result.losses)
    assert str(twin.plan) == str(result.plan)
    for name, w in result.network.weights.items():
        assert np.array_equal(twin.network.weights[name], w), name


def test_one_run_has_all_threads_and_several_have_one_each():
    net, x, y, _ = case(200, 300, 200, 10, n=300)
    for runs, expected in ((1, core_count()), (2, None)):
        shared = SharedData(runs)
        planned = plan_run(net, x, y, TrainOptions(batch_size=300), shared, device="cpu", threads=None)
        together = start_runs([planned], x, y, shared)
        assert together.bound.steps.threads == expected


def fit_and_listen(name, device="cpu", epochs=40, **more):
    """Epochs of a case and their callbacks: queued if they are short, or one at a time."""
    net, x, y, training = CASES[name]()
    heard = []
    result = fit(
        net, x, y, device=device, epochs=epochs, seed=3,
        on_progress=lambda p: heard.append((p.epoch, p.step)), on_epoch=lambda e: heard.append((e.epoch, e.loss)),
        **training, **more,
    )  # fmt: skip
    return result, heard


def assert_queued_epochs_are_the_same(name, device, monkeypatch, epochs=40):
    calls = []
    monkeypatch.setattr(training_run, "REPORT_SECONDS", 1e3)
    keep = TrainingRun.keep
    monkeypatch.setattr(
        TrainingRun, "keep", lambda run, trained, took: (calls.append(len(trained)), keep(run, trained, took))
    )
    queued, heard = fit_and_listen(name, device, epochs)
    assert max(calls) > 1
    monkeypatch.setattr(training_run, "epochs_at_once", lambda rows, batch: 1)
    single, heard_singly = fit_and_listen(name, device, epochs)
    assert [each for each in heard if each[0] > 3] == [each for each in heard_singly if each[0] > 3]
    assert np.array_equal(queued.losses, single.losses)
    for key, w in single.network.weights.items():
        assert np.array_equal(queued.network.weights[key], w), key
    assert [epoch.accuracy for epoch in queued.history] == [epoch.accuracy for epoch in single.history]


@pytest.mark.parametrize("name", ["cosine", "adam", "rows as they come"])
def test_epochs_that_are_queued_have_the_bits_of_single_ones(name, monkeypatch):
    assert_queued_epochs_are_the_same(name, "cpu", monkeypatch)


@needs_gxx
@pytest.mark.parametrize("name", ["cosine", "one layer"])
def test_emulated_epochs_that_are_queued_have_the_bits_of_single_ones(name, monkeypatch):
    emulate_device(monkeypatch)
    assert_queued_epochs_are_the_same(name, "cuda", monkeypatch, epochs=10)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["cosine", "adam", "rows as they come"])
def test_epochs_that_a_gpu_has_queued_have_the_bits_of_single_ones(name, monkeypatch):
    assert_queued_epochs_are_the_same(name, "cuda", monkeypatch)


def test_a_run_of_queued_epochs_resumes_with_the_same_bits(tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "REPORT_SECONDS", -1.0)  # epochs are queued, and every settled state is saved
    whole, _ = fit_and_listen("cosine")
    net, x, y, training = CASES["cosine"]()

    def stop(progress):
        if progress.epoch == 30:
            raise KeyboardInterrupt

    kept = {"checkpoint": tmp_path, "checkpoint_every": 0.0, "epochs": 40, "seed": 3, "device": "cpu", **training}
    with pytest.raises(KeyboardInterrupt):
        fit(net, x, y, on_progress=stop, **kept)
    resumed = fit(net, x, y, resume=True, **kept)
    assert np.array_equal(resumed.losses, whole.losses)


def test_accuracy_is_that_of_the_rows_before_they_were_learnt():
    net, x, y, training = CASES["one layer"]()
    result = fit(net, x, y, epochs=1, seed=7, device="cpu", **training)
    order, correct, learnt = epoch_order(len(x), 7, 0), 0, net
    for start in range(0, len(x), 7):
        batch = order[start : start + 7]
        correct += int((reference.forward(learnt, x[batch]).argmax(1) == y[batch]).sum())
        _, gradients = reference.loss_and_gradients(learnt, x[batch], y[batch], "cross_entropy")
        learnt = reference.sgd_step(learnt, {}, gradients, 0.1, 0.0)
    assert result.history[0].accuracy == correct / len(x)


def test_validation_evaluates_the_held_out_rows():
    net, x, y, _ = CASES["one layer"]()
    told = fit(net, x, y, epochs=1, device="cpu", validation=0.3, lr=1e-9).history[0]
    _, held = hold_out(len(x), 0.3, 0)
    assert len(held) == 9
    assert told.validation_accuracy == (reference.forward(net, x[held]).argmax(1) == y[held]).mean()


def test_early_stopping_keeps_the_best_epoch():
    rng = np.random.default_rng(3)
    x, y = rows(120, 30), rng.integers(0, 2, 120)  # nothing to learn: the validation loss soon rises
    options = {"lr": 0.1, "validation": 0.3, "seed": 2, "device": "cpu", "batch_size": 10}
    stopped = fit(mlp(30, 40, 2), x, y, epochs=200, patience=4, **options)
    told = [epoch.validation_loss for epoch in stopped.history]
    assert len(told) < 200
    assert stopped.best_epoch == int(np.argmin(told)) + 1 == len(told) - 4
    best = fit(mlp(30, 40, 2), x, y, epochs=stopped.best_epoch, **options)
    for name, w in best.network.weights.items():
        assert np.array_equal(stopped.network.weights[name], w)


def test_state_is_continued():
    net, x, y, training = CASES["adam"]()
    whole = fit(net, x, y, epochs=2, seed=0, device="cpu", **training)
    first = fit(net, x, y, epochs=1, seed=0, device="cpu", **training)
    order = epoch_order(len(x), 0, 1)
    more = fit(first.network, x[order], y[order], epochs=1, shuffle=False, state=first.state, device="cpu", **training)
    assert np.array_equal(np.concatenate([first.losses, more.losses]), whole.losses)
    with pytest.raises(FormatError, match=r"velocity:fc1\.weight"):
        fit(net, x, y, epochs=1, state=first.state, momentum=0.9, device="cpu")


@pytest.mark.parametrize("name", ["digits", "full batch, past a block", "adam", "weights, smoothing, clipped"])
def test_same_bits_run_to_run_and_whatever_the_threads(name):
    net, x, y, options = CASES[name]()
    before = {name: w.copy() for name, w in net.weights.items()}
    runs = [fit(net, x, y, epochs=2, device="cpu", threads=t, **options) for t in (1, core_count(), core_count())]
    for other in runs[1:]:
        assert np.array_equal(other.losses, runs[0].losses)
        assert [e.validation_loss for e in other.history] == [e.validation_loss for e in runs[0].history]
        for name in net.weights:
            assert np.array_equal(other.network.weights[name], runs[0].network.weights[name])
    for name, w in before.items():
        assert np.array_equal(net.weights[name], w)  # the given network is unchanged


@pytest.mark.parametrize("batch", [200, 257, 1024, 1500, 2048, 4096, 9000])
def test_same_bits_for_any_assignment_of_blocks(batch, monkeypatch):
    """Threads share a block or take separate blocks, or one thread does all."""
    net, x, y, options = case(
        33, 40, 17, 5, n=9000, options=SIGMOIDS, loss="half_sse", batch_size=batch, lr=1e-4, momentum=0.5,
        validation=0.01, clip_norm=1.0 if batch in (257, 2048) else 0.0,
    )  # fmt: skip
    monkeypatch.setattr(mlp_train, "SINGLE_THREAD_FLOP", 0)  # several threads even for little work
    every = {"device": "cpu", "epochs": 2, **options}
    runs = [fit(net, x, y, threads=threads, **every) for threads in (1, core_count())]
    runs += fit_runs([Run(net, TrainOptions(epochs=2, **options))], x, y, device="cpu")
    monkeypatch.setattr(mlp_train, "CACHED_WEIGHT_BYTES", 0)
    runs.append(fit(net, x, y, threads=core_count(), **every))
    monkeypatch.setattr(mlp_train, "CACHED_WEIGHT_BYTES", 1 << 30)
    monkeypatch.setattr(mlp_train, "GRADIENT_BYTES", 1)
    runs += [fit(net, x, y, threads=threads, **every) for threads in (1, core_count())]
    for other in runs[1:]:
        assert np.array_equal(other.losses, runs[0].losses)
        assert [e.validation_loss for e in other.history] == [e.validation_loss for e in runs[0].history]
        for name in net.weights:
            assert np.array_equal(other.network.weights[name], runs[0].network.weights[name])


def test_it_learns():
    x = rows(600, 10)
    y = (x[:, 0] > x[:, 1]).astype(np.int64)
    result = fit(mlp(10, 32, 2), x, y, epochs=40, lr=0.1, device="cpu")
    assert (reference.forward(result.network, x).argmax(1) == y).mean() > 0.97
    assert result.epoch_losses[-1] < 0.3 * result.epoch_losses[0]


def test_progress_is_reported():
    seen = []
    fit(
        mlp(4, 3), rows(100, 4), np.zeros(100, np.int64), epochs=2, batch_size=30, device="cpu", on_progress=seen.append
    )
    assert (seen[-1].epoch, seen[-1].step, seen[-1].steps) == (2, 4, 4)
    assert all(p.samples_per_s > 0 and np.isfinite(p.loss) for p in seen)


def test_classes_that_change_after_the_call_began_change_nothing():
    net, x, y = mlp(8, 6, 3), rows(60, 8), np.arange(60) % 3
    whole = fit(net, x, y.copy(), device="cpu", epochs=3)
    meddled = fit(net, x, y, device="cpu", epochs=3, on_progress=lambda _: y.fill(1))
    assert np.array_equal(meddled.losses, whole.losses)


def test_a_bias_that_two_layers_share_is_trained_by_layers():
    weights = {"w1": rows(4, 4), "w2": rows(4, 4, seed=2), "b": rows(1, 4, seed=3)[0]}
    nodes = (
        Node("a", Linear(), ("x",), {"weight": "w1", "bias": "b"}),
        Node("r", ReLU(), ("a",)),
        Node("c", Linear(), ("r",), {"weight": "w2", "bias": "b"}),
    )
    net = Network({"x": TensorType(("B", 4))}, nodes, ("c",), weights)
    assert_trained_by_layers(net, "its own weights, got 'b'")


def assert_trained_by_layers(net, why):
    """One step on eight rows, as by the gradients of the reference."""
    x, y = rows(8, net.input.row_size), np.arange(8) % net.output.row_size
    result = fit(net, x, y, lr=0.5, batch_size=8, epochs=1, device="cpu")
    assert why in result.plan.refusals[0].why
    loss, gradients = reference.loss_and_gradients(net, x, y, "cross_entropy")
    assert result.losses[0] == pytest.approx(loss, rel=1e-5)
    for name, gradient in gradients.items():
        np.testing.assert_allclose(result.network.weights[name], net.weights[name] - 0.5 * gradient, atol=1e-5)


def test_the_order_is_the_documented_one():
    assert np.array_equal(epoch_order(10, 3, 2), np.random.default_rng((3, 2)).permutation(10))
    assert sorted(epoch_order(10, 3, 2)) == list(range(10))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"y": np.array([0, 1, 2, 5])}, InputError, "class is out of range"),
        ({"y": np.array([0, 1, -1, 1])}, InputError, "-1 in row 2"),
        ({"y": np.zeros(3, np.int64)}, ShapeError, "classes do not fit"),
        ({"y": np.zeros(4, np.float32)}, ShapeError, "classes do not fit"),
        ({"y": [0, 1, 2, 0]}, ShapeError, "not an array"),
        ({"x": np.zeros((4, 5), np.uint8)}, ShapeError, "dtype"),
        ({"x": np.zeros((4, 6), np.float32)}, ShapeError, "shape"),
        ({"x": np.zeros((0, 5), np.float32), "y": np.zeros(0, np.int64)}, InputError, "nothing to train on"),
        ({"loss": "hinge"}, InputError, "unknown loss"),
        ({"loss": "half_sse"}, ShapeError, "targets do not fit"),
        ({"lr": 0.0}, InputError, "learning rate"),
        ({"lr": float("nan")}, InputError, "learning rate"),
        ({"momentum": 1.0}, InputError, "momentum"),
        ({"batch_size": 0}, InputError, "batch size"),
        ({"epochs": 0}, InputError, "epochs"),
        ({"threads": 10_000}, InputError, "threads"),
        ({"net": mlp(5, 3, output="Softmax")}, InputError, "train without it"),
        ({"validation": 0.9}, InputError, "no rows left to train on"),
        ({"momentun": 0.5}, InputError, "did you mean momentum"),
        ({"resume": True}, InputError, "nothing to resume from"),
    ],
)
def test_bad_input_is_refused(change, error, message):
    arguments = {"net": mlp(5, 3), "x": rows(4, 5), "y": np.array([0, 1, 2, 0]), "device": "cpu", "epochs": 1} | change
    net, x, y = (arguments.pop(name) for name in ("net", "x", "y"))
    with pytest.raises(error, match=message) as caught:
        fit(net, x, y, **arguments)
    assert isinstance(caught.value, OnchipError)


def test_a_run_that_diverges_says_so():
    x = rows(64, 5) * 100
    with pytest.raises(KernelError, match="training diverged") as caught:
        fit(mlp(5, 8, 3), x, np.arange(64) % 3, lr=1e30, epochs=3, device="cpu")
    assert "epoch" in caught.value.got


def test_history_tells_every_epoch():
    seen = []
    options = {"lr": 0.1, "schedule": "step", "step_every": 2, "step_factor": 0.5, "validation": 0.2, "epochs": 4}
    result = fit(mlp(4, 3), rows(100, 4), np.arange(100) % 3, device="cpu", on_epoch=seen.append, **options)
    assert tuple(seen) == result.history
    assert [epoch.epoch for epoch in seen] == [1, 2, 3, 4]
    assert [epoch.lr for epoch in seen] == pytest.approx([0.1, 0.1, 0.05, 0.05])
    steps = len(result.losses) // 4
    assert seen[1].loss == pytest.approx(np.average(result.losses[steps : 2 * steps], weights=[64, 16]))
    assert all(0 <= epoch.validation_accuracy <= 1 and epoch.seconds > 0 for epoch in seen)


def test_the_rate_of_an_epoch_is_that_of_its_last_step():
    options = {"lr": 0.2, "warmup": 1.5, "epochs": 3, "batch_size": 10}
    result = fit(mlp(4, 3), rows(40, 4), np.arange(40) % 3, device="cpu", **options)
    assert [epoch.lr for epoch in result.history] == pytest.approx([0.2 * 4 / 6, 0.2, 0.2])


def test_a_slope_below_zero_is_trained_by_layers():
    net = sequential(
        TensorType(("B", 2)), [("a", Linear()), ("l", LeakyReLU(-0.1)), ("b", Linear())],
        {"a.weight": rows(3, 2), "b.weight": rows(2, 3)},
    )  # fmt: skip
    assert_trained_by_layers(net, "slope below 0")


# -- debug ---------------------------------------------------------------------------------------------------


def of_ones(D_in, D_out):
    """A network whose outputs are infinite for a row of the largest floats."""
    net = mlp(D_in, D_out)
    return net.replace(weights={**net.weights, "fc1.weight": np.ones((D_out, D_in), np.float32)})


def test_debug_names_the_row_whose_values_overflow():
    x = rows(40, 4)
    x[17] = 3e38
    with pytest.raises(KernelError, match="not finite in epoch 1") as caught:
        fit(of_ones(4, 3), x, np.zeros(40, np.int64), batch_size=8, debug=True, device="cpu")
    assert caught.value.got == "layer 'fc1' returns inf in row 17 of the training rows"
    step = int(np.flatnonzero(epoch_order(40, 0, 0) == 17)[0]) // 8 + 1
    assert f"step {step}" in caught.value.what


def test_debug_names_the_layer_and_the_weight():
    net = mlp(4, 5, 3)
    big = net.replace(weights={**net.weights, "fc2.weight": np.full((3, 5), 3e38, np.float32)})
    with pytest.raises(KernelError) as caught:
        fit(big, np.abs(rows(10, 4)) + 5, np.zeros(10, np.int64), debug=True, device="cpu")
    assert caught.value.got.startswith("layer 'fc2' returns inf in row")
    with pytest.raises(KernelError) as caught:
        fit(net, rows(10, 4), np.zeros(10, np.int64), lr=3e38, momentum=0.9, epochs=9, debug=True, device="cpu")
    assert "after the update" in caught.value.got or "returns" in caught.value.got


def test_debug_changes_no_bits():
    net, x, y, training = CASES["odd widths"]()
    plain, slow = (fit(net, x, y, epochs=2, device="cpu", debug=debug, **training) for debug in (False, True))
    assert np.array_equal(plain.losses, slow.losses)


def test_the_last_update_is_checked_too():
    x, y = rows(60, 5) * np.float32(1e18), np.arange(60) % 3
    with pytest.raises(KernelError, match="training diverged") as caught:
        fit(mlp(5, 3), x, y, lr=1e30, epochs=1, batch_size=60, device="cpu")
    assert "weight" in caught.value.got or "loss" in caught.value.got


def test_a_validation_loss_that_is_not_finite_ends_the_run():
    x = rows(50, 4)
    _, held = hold_out(50, 0.1, 0)
    x[held[0]] = 3e38
    with pytest.raises(KernelError, match="training diverged") as caught:
        fit(of_ones(4, 3), x, np.arange(50) % 3, epochs=4, validation=0.1, patience=2, device="cpu")
    assert caught.value.got.startswith("validation loss")


def test_a_state_of_another_network_is_refused():
    with pytest.raises(FormatError, match="optimiser state"):
        fit(mlp(4, 3), rows(9, 4), np.zeros(9, np.int64), state={}, epochs=1, device="cpu")
