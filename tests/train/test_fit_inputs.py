"""Inputs that fit converts, callbacks, and how a run is ended."""

import inspect
import subprocess
import sys

import numpy as np
import pandas
import pytest

import onchip
from onchip import cache
from onchip.errors import FormatError, InputError, ShapeError
from onchip.network.build import sequential
from onchip.network.layers import Linear, Sigmoid, Softmax
from onchip.network.types import TensorType
from onchip.train.many import Run, fit_runs
from onchip.train.options import TrainOptions
from onchip.train.order import hold_out
from row_steps import DlpackArray


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(50, 3)).astype(np.float32)
    return x, (x[:, 0] > x[:, 1]).astype(np.int64)


def fit(x, y, **options):
    return onchip.fit(onchip.mlp(3, 8, 2), x, y, **{"epochs": 3, "batch_size": 16, "device": "cpu", **options})


def test_every_option_is_a_keyword_with_its_default():
    given = inspect.signature(onchip.fit).parameters
    for name, value in TrainOptions().__dict__.items():
        assert given[name].default == value


def test_other_types_of_rows_give_the_same_run(data):
    x, y = data
    losses = fit(x, y).epoch_losses
    table = pandas.DataFrame(x.astype(np.float64), columns=["a", "b", "c"])
    for rows, classes in ((x.astype(np.float64), y), (table, pandas.Series(y)), (table, y.astype(np.int32))):
        assert fit(rows, classes).epoch_losses == losses
    torch = pytest.importorskip("torch")
    assert fit(torch.tensor(x, requires_grad=True), torch.tensor(y)).epoch_losses == losses


def test_arrays_of_the_host_of_other_libraries(data):
    x, y = (DlpackArray(array) for array in data)
    assert fit(x, y).losses.tobytes() == fit(*data).losses.tobytes()


def test_a_conversion_is_reported_once(data, capfd, monkeypatch):
    monkeypatch.setenv("ONCHIP_QUIET", "")
    monkeypatch.setattr(cache, "printed", set())
    for _ in range(2):
        fit(data[0].astype(np.float64), data[1])
    assert capfd.readouterr().err.count("fit: rows in float64 are converted to float32") == 1


def test_bytes_are_not_converted_silently(data):
    with pytest.raises(ShapeError, match="wrong dtype"):
        fit(np.zeros((5, 3), np.uint8), np.zeros(5, np.int64))


def test_targets_are_converted_too(data):
    x, _ = data
    net = onchip.mlp(3, 1)
    a, b = (
        onchip.fit(net, x, y, loss="mse", epochs=2, device="cpu")
        for y in (x[:, :1].astype(np.float64), x[:, :1])
    )  # fmt: skip
    assert a.epoch_losses == b.epoch_losses


def test_validation_data_is_evaluated_and_not_trained_on(data):
    x, y = data
    alone = fit(x, y)
    verified = fit(x, y, validation_data=(x[:7].astype(np.float64), y[:7]), patience=2)
    assert verified.epoch_losses == alone.epoch_losses
    assert all(epoch.validation_accuracy * 7 == pytest.approx(round(epoch.validation_accuracy * 7))
               for epoch in verified.history)  # fmt: skip
    with pytest.raises(InputError, match="two sources of validation rows"):
        fit(x, y, validation=0.1, validation_data=(x, y))


def test_a_run_that_is_stopped_keeps_its_result(data):
    x, y = data
    result = fit(x, y, epochs=50, stop=lambda epoch: epoch.epoch == 2)
    assert len(result.history) == 2
    two = fit(x, y, epochs=2)
    for name, weight in two.network.weights.items():
        assert np.array_equal(result.network.weights[name], weight)


def test_an_epochs_loss_is_the_mean_over_its_rows(data):
    x, y = data
    result = fit(x, y, epochs=1, lr=1e-30)  # the weights stay: one batch of all rows has the same loss
    whole = fit(x, y, epochs=1, lr=1e-30, batch_size=50)
    assert result.epoch_losses[0] == pytest.approx(whole.epoch_losses[0], rel=1e-6)


@pytest.mark.parametrize(("layer", "kind"), [(Softmax(), "Softmax"), (Sigmoid(), "Sigmoid")])
def test_an_output_that_the_loss_computes_is_named(data, layer, kind):
    weights = {"a.weight": np.ones((2, 3), np.float32)}
    net = sequential(TensorType(("B", 3)), [("a", Linear()), ("end", layer)], weights)
    with pytest.raises(InputError, match=rf"(?s)expects logits.*layer 'end' \({kind}\)"):
        onchip.fit(net, *data, device="cpu")


def test_weights_of_rows_and_classes_are_one_thing(data):
    x, y = data
    counts = np.bincount(y)
    of_class = {0: len(y) / (2 * counts[0]), 1: len(y) / (2 * counts[1])}
    runs = [fit(x, y, **given).epoch_losses for given in (
        {"class_weight": "balanced"}, {"class_weight": of_class}, {"class_weight": list(of_class.values())},
        {"sample_weight": np.where(y == 0, of_class[0], of_class[1])},
    )]  # fmt: skip
    assert all(losses == pytest.approx(runs[0], rel=1e-6) for losses in runs)
    assert fit(x, y, sample_weight=np.ones(len(x))).epoch_losses == fit(x, y).epoch_losses
    verified = fit(x, y, class_weight="balanced", validation_data=(x[:7], y[:7]), sample_weight=pandas.Series(y + 1.0))
    assert verified.epoch_losses == fit(x, y, class_weight="balanced", sample_weight=(y + 1).tolist()).epoch_losses


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"sample_weight": np.ones(49)}, ShapeError, "sample weights do not fit"),
        ({"sample_weight": np.array(["1"] * 50)}, ShapeError, "sample weights do not fit"),
        ({"sample_weight": np.where(np.arange(50) == 9, -1, 1)}, InputError, "-1 in row 9"),
        ({"sample_weight": np.full(50, np.nan)}, InputError, "nan in row 0"),
        ({"sample_weight": np.zeros(50)}, InputError, "all row weights are zero"),
        ({"class_weight": [1, 2, 3]}, InputError, "3 class weights"),
        ({"class_weight": {2: 1}}, InputError, "unknown class"),
    ],
)
def test_weights_that_do_not_fit_are_refused(data, given, error, words):
    with pytest.raises(error, match=words):
        fit(*data, **given)


def test_names_of_other_libraries(data):
    x, y = data
    assert (
        fit(x, y, learning_rate=0.1, optimizer="Adam").epoch_losses == fit(x, y, lr=0.1, optimiser="adam").epoch_losses
    )
    for typed, meant in (("momentun", "momentum"), ("learning_rat", "learning_rate"), ("on_epochs", "on_epoch")):
        with pytest.raises(InputError, match=rf"did you mean {meant}\?"):
            fit(x, y, **{typed: 0.5})


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"lr": 0.1, "learning_rate": 0.2}, "two values of lr"),
        ({"validation_data": (np.zeros((2, 3)), np.zeros(2), np.ones(2))}, "3 values"),
        ({"validation_data": {"x": 1}}, "dict"),
        ({"validation_data": (np.zeros((0, 3), np.float32), np.zeros(0, np.int64))}, "nothing to validate on"),
        ({"state": [1, 2]}, "bad state"),
        ({"checkpoint": 5}, "bad checkpoint folder"),
        ({"checkpoint": ""}, "bad checkpoint folder"),
        ({"threads": True}, "threads"),
        ({"threads": "1"}, "'1'"),
        ({"on_epoch": 3}, "bad on_epoch"),
        ({"stop": True}, "bad stop"),
    ],
)
def test_bad_arguments_are_refused(data, given, words):
    with pytest.raises(InputError, match=words):
        fit(*data, **given)


def test_names_of_losses_have_any_case_with_rows_to_validate_on_too(data):
    x, y = data
    assert fit(x, y, loss="Cross_Entropy", validation_data=(x, y)).history[-1].validation_loss > 0
    with pytest.raises(InputError, match="unknown loss"):
        fit(x, y, loss="entropy", validation_data=(x, y))


def test_rows_to_validate_on_that_weigh_nothing_are_refused(data):
    x, y = data
    _, held = hold_out(len(x), 0.2, 0)
    weights = np.ones(len(x))
    weights[held] = 0
    with pytest.raises(InputError, match=r"(?s)all row weights are zero.*validation"):
        fit(x, y, sample_weight=weights, validation=0.2, patience=1)


def test_a_state_of_another_optimiser_is_refused(data):
    adam = fit(*data, optimiser="adam").state
    with pytest.raises(FormatError, match="another optimiser"):
        fit(*data, state=adam)


def test_numpy_scalars_as_threads_and_widths(data):
    x, y = data
    one = fit(x, y, threads=np.int64(1))
    same = onchip.fit(onchip.mlp(*np.array([3, 8, 2])), x, y, epochs=3, batch_size=16, device="cpu", threads=1)
    assert one.epoch_losses == same.epoch_losses


@pytest.mark.parametrize("given", [{"seed": None}, {"seed": 1.5}, {"activation": 3}])
def test_a_network_of_nonsense_is_refused(given):
    with pytest.raises(InputError):
        onchip.mlp(3, 8, 2, **given)


def test_objects_that_are_not_networks_are_refused(data):
    with pytest.raises(InputError, match=r"(?s)not a network.*onchip\.load"):
        onchip.fit("digits", *data)


@pytest.mark.parametrize(
    ("y", "hint"),
    [
        (np.zeros(100, np.float32), "y.reshape(50, 2)"),
        (np.zeros(50, np.int64), "loss 'cross_entropy', if these are classes"),
        (np.zeros((50, 3), np.float32), "one value per output"),
    ],
)
def test_targets_that_do_not_fit_get_a_hint(data, y, hint):
    with pytest.raises(ShapeError, match="targets do not fit") as caught:
        fit(data[0], y, loss="mse")
    assert caught.value.hint == hint


@pytest.mark.parametrize(
    ("y", "hint"),
    [
        (np.eye(2)[np.arange(50) % 2], "y.argmax(axis=1): these are one-hot"),
        (np.arange(50) % 2 > 0, "y.astype(np.int64)"),
        (np.arange(50)[:, np.newaxis] % 2, "y[:, 0]"),
        (np.array(["a", "b"])[np.arange(50) % 2], "np.unique(y, return_inverse=True)"),
    ],
)
def test_classes_that_do_not_fit_get_a_hint(data, y, hint):
    with pytest.raises(ShapeError, match="classes do not fit") as caught:
        fit(data[0], y)
    assert hint in caught.value.hint


def test_a_batch_that_does_not_fit_into_memory_is_refused_before_the_first_step(data, monkeypatch):
    monkeypatch.setattr("onchip.files.free_memory", lambda: 1000)
    with pytest.raises(InputError, match=r"a step of 16 rows does not fit(?s:.)*at most 1,000 B(?s:.)*batch_size="):
        fit(*data, nesterov=True, momentum=0.9, on_progress=pytest.fail)


@pytest.mark.parametrize(("value", "told"), [(np.nan, "nan"), (-np.inf, "-inf")])
def test_missing_values_are_refused_before_the_first_step(data, value, told):
    x, y = data
    bad, targets = x.copy(), np.zeros((50, 2), np.float32)
    bad[17, 2], targets[9, 1] = value, value
    for call in (
        lambda: fit(bad, y), lambda: fit(x, y, validation_data=(bad, y)),
        lambda: fit_runs([Run(onchip.mlp(3, 2), TrainOptions())], bad, y, device="cpu"),
    ):  # fmt: skip
        with pytest.raises(InputError, match="not finite") as caught:
            call()
        assert caught.value.got == f"{told} in row 17, position 2"
    with pytest.raises(InputError, match="targets are not finite") as caught:
        fit(x, targets, loss="mse")
    assert caught.value.got == f"{told} in row 9, position 1"


def test_a_fit_with_cached_kernels_loads_no_numba():
    """With one thread and several, with validation rows; the first process compiles missing kernels."""
    code = (
        "import sys, numpy as np, onchip\n"
        "x, y = np.zeros((300, 64), np.float32), np.zeros(300, np.int64)\n"
        "for batch in (16, 300):\n"
        "    onchip.fit(onchip.mlp(64, 320, 10), x, y, epochs=1, batch_size=batch, validation=0.1, device='cpu')\n"
        "print('numba' in sys.modules)"
    )
    for _ in range(2):
        ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "False\n"
