"""LeNet-5 of the digits workload: shapes at any size, seeded weights, refused sizes, and what it learns."""

import dataclasses

import numpy as np
import pytest

import onchip
from onchip.errors import InputError
from onchip.network.layers import Conv2d
from onchip.workloads import digits, lenet, train_job
from onchip.workloads.table_data import Source


@pytest.mark.parametrize(("pixels", "side", "flat"), [(784, 28, 400), (64, 8, 64), (144, 12, 16), (16, 4, 16)])
def test_the_network_reads_square_images(pixels, side, flat):
    net = lenet.network(pixels)
    assert (net.input.row_shape, net.output.row_shape) == ((1, side, side), (10,))
    assert net.weight_type("fc1.weight").shape == (120, flat)
    y = onchip.compile(net, device="cpu")(np.random.default_rng(0).random((7, 1, side, side), np.float32))
    assert y.shape == (7, 10)
    assert np.isfinite(y).all()


def test_weights_are_seeded():
    first, again, other = lenet.network(), lenet.network(), lenet.network(seed=1)
    assert [node.layer.kind for node in first.nodes if isinstance(node.layer, Conv2d)] == ["Conv2d"] * 2
    np.testing.assert_array_equal(first.weights["conv2.weight"], again.weights["conv2.weight"])
    assert (first.weights["conv2.weight"] != other.weights["conv2.weight"]).any()
    assert np.std(first.weights["fc1.weight"]) == pytest.approx(np.sqrt(2 / 400), rel=0.02)
    assert not first.weights["fc1.bias"].any()


@pytest.mark.parametrize("pixels", [0, 1, 30, 36, 100])
def test_other_rows_are_refused(pixels):
    with pytest.raises(InputError, match="square images whose side is a multiple of 4"):
        lenet.network(pixels)


def test_it_learns_the_small_digits():
    job = train_job.train_job("digits", Source("sklearn"), {}, network="lenet")
    assert (job.net.name, job.options) == ("lenet5", lenet.TRAIN)
    data = job.data
    images = data.x_train.reshape(-1, *job.net.input.row_shape)
    result = onchip.fit(job.net, images, data.y_train, device="cpu", **dataclasses.asdict(job.options))
    y = onchip.compile(result.network, device="cpu")(data.x_test.reshape(-1, *job.net.input.row_shape))
    assert (y.argmax(axis=1) == data.y_test).mean() > 0.9


def test_networks_by_name():
    assert train_job.train_job("digits", Source("sklearn"), {}, network="MLP").options == digits.TRAIN
    with pytest.raises(InputError, match=r"unknown network(.|\n)*mlp, lenet"):
        train_job.train_job("digits", Source("sklearn"), {}, network="alexnet")
    with pytest.raises(InputError, match=r"--network lenet with backprop(.|\n)*onchip train digits --network"):
        train_job.train_job("backprop", Source(), {}, network="lenet")
    with pytest.raises(InputError, match="--activation is for a new network"):
        train_job.train_job("digits", Source("sklearn"), {}, network="lenet", activation="Tanh")
