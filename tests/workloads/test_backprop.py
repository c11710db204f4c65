import numpy as np
import pytest

from onchip.kernels import reference
from onchip.train.loop import fit
from onchip.workloads import backprop, digits, load


def test_the_network_is_the_documented_one():
    net = load("backprop")
    assert [node.layer.kind for node in net.nodes] == ["Linear", "Sigmoid"] * 3
    rng = np.random.default_rng(7)
    for name, w in backprop.network(64, hidden=(5, 3), seed=7).weights.items():
        if name.endswith("bias"):
            assert not w.any()
        else:
            np.testing.assert_array_equal(w, rng.random(w.shape, dtype=np.float32) - np.float32(0.5))
    shapes = [w.shape for name, w in net.weights.items() if name.endswith("weight")]
    assert shapes == [(56, 784), (28, 56), (10, 28)]


def test_targets_are_one_hot(monkeypatch, tmp_path):
    monkeypatch.setenv("ONCHIP_DATA", str(tmp_path))
    monkeypatch.setenv("ONCHIP_CACHE", str(tmp_path))
    data, classes = backprop.load_data("auto"), digits.load_data("sklearn")
    assert data.inputs == 64
    for y, truth in ((data.y_train, classes.y_train), (data.y_test, classes.y_test)):
        assert y.dtype == np.float32
        assert y.shape == (len(truth), 10)
        assert (y.argmax(axis=1) == truth).all()
        assert (y.sum(axis=1) == 1).all()


def test_without_mnist_patterns_are_random(monkeypatch, tmp_path):
    monkeypatch.setenv("ONCHIP_DATA", str(tmp_path))
    monkeypatch.setenv("ONCHIP_CACHE", str(tmp_path))
    made, which = backprop.patterns(9)
    assert (which, len(made), made.x.shape, made.y.shape) == ("random data", 9, (9, 784), (9, 10))
    assert made.x.dtype == made.y.dtype == np.float32
    assert np.array_equal(made[2:4].x, made.x[2:4])
    assert np.array_equal(made[2:4].y, made.y[2:4])


def test_more_patterns_than_there_are_begin_again(data_folder):
    made, which = backprop.patterns(60_001)
    assert which == "MNIST"
    assert np.array_equal(made.x[60_000], made.x[0])
    assert np.array_equal(made.y[60_000], made.y[0])
    assert made.x.flags.c_contiguous


@pytest.mark.parametrize("n", [1, 300])
def test_its_options_train_it_by_full_batches(n):
    rng = np.random.default_rng(n)
    x, y = rng.random((n, 784), dtype=np.float32), backprop.one_hot(rng.integers(0, 10, n))
    net, options = backprop.network(), backprop.TRAIN
    result = fit(net, x, y, loss=options.loss, lr=options.lr, momentum=options.momentum,
                 batch_size=options.batch_size, shuffle=options.shuffle, epochs=3, device="cpu")  # fmt: skip
    assert len(result.losses) == 3  # one update an epoch
    loss, _ = reference.loss_and_gradients(net, x, y, "half_sse")
    assert result.losses[0] == pytest.approx(loss, rel=1e-6)
    assert result.losses[2] < result.losses[1] < result.losses[0]
