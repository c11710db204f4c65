import json

import numpy as np

from onchip.kernels import reference
from onchip.workloads import load, scan
from onchip.workloads.job import weights_note


def test_the_network_is_one_row_of_running_sums():
    net = load("scan")
    assert [node.layer.kind for node in net.nodes] == ["CumSum"]
    assert net.input.row_shape == net.output.row_shape == (1 << 24,)
    assert not net.weights
    x = scan.inputs(101)
    np.testing.assert_array_equal(
        reference.forward(scan.network(101), x[None])[0], np.add.accumulate(x.astype(np.float64))
    )


def test_the_weights_are_the_documented_ones():
    x = scan.inputs(1001, seed=5)
    np.testing.assert_array_equal(x, np.random.default_rng(5).standard_normal(1001, dtype=np.float32))
    assert x.dtype == np.float32
    assert 400 < (x > 0).sum() < 600


def test_a_plan_of_it(cli):
    ran = cli("plan", "scan", "--device", "cpu", "--batch", 1, "--json")
    assert ran.code == 0, ran.err
    (group,) = json.loads(ran.out)["groups"]
    assert group["layers"] == ["sums"]


def test_there_are_no_weights_to_speak_of():
    assert weights_note("scan", None, load("scan")) == []
    assert weights_note("decode", None, load("decode")) != []
