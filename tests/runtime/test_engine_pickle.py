"""Engines that are copied, pickled and loaded elsewhere: the same bits, or an error that says why not."""

import copy
import dataclasses
import multiprocessing
import os
import pickle
import subprocess
import sys

import joblib
import numpy as np
import pytest

import onchip
from checks import rows
from onchip.errors import DeviceError, PlanError
from onchip.network.build import mlp
from onchip.network.graph import Network, Node
from onchip.network.layers import Add, Conv2d, Linear, ReLU, Softmax, Tanh
from onchip.network.types import TensorType
from onchip.plan.device import H200
from onchip.runtime import engine as engine_module
from onchip.runtime import placement
from onchip.runtime.cpu.backend import this_cpu
from onchip.workloads import faces
from raced_ids import good_ids, text_network


def two_inputs():
    weights = {"w": rows(6, 8), "v": rows(6, 4)}
    nodes = (
        Node("a", Linear(), ("x",), {"weight": "w"}), Node("b", Tanh(), ("a",)),
        Node("c", Linear(), ("y",), {"weight": "v"}), Node("d", Add(), ("b", "c")), Node("e", Softmax(-1), ("d",)),
    )  # fmt: skip
    return Network({"x": TensorType(("B", 8)), "y": TensorType(("B", 4))}, nodes, ("e", "b"), weights)


def image_network():
    nodes = (Node("conv", Conv2d(pads=(1, 1, 1, 1)), ("x",), {"weight": "w"}), Node("relu", ReLU(), ("conv",)))
    return Network({"x": TensorType(("B", 3, 8, 8))}, nodes, ("relu",), {"w": rows(5, 27).reshape(5, 3, 3, 3)})


# A network, its options, and rows for it.
CASES = {
    "mlp": (lambda: mlp(9, 33, 4), {}, lambda: (rows(50, 9),)),
    "one thread": (lambda: mlp(9, 33, 4), {"threads": 1, "batch_hint": 7}, lambda: (rows(50, 9),)),
    "merged layers": (lambda: mlp(9, 7, 8, activation="Identity"), {}, lambda: (rows(50, 9),)),
    "not merged": (lambda: mlp(9, 7, 8, activation="Identity"), {"without": ("merge",)}, lambda: (rows(50, 9),)),
    "halves in memory": (lambda: mlp(9, 33, 4), {"io": "fp16"}, lambda: (rows(50, 9).astype(np.float16),)),
    "two inputs": (two_inputs, {}, lambda: (rows(50, 8), rows(50, 4))),
    "images": (image_network, {}, lambda: (rows(9, 3 * 64).reshape(9, 3, 8, 8),)),
    "tables in halves": (
        lambda: text_network("folded, int64"),
        {"batch_hint": 10**9, "tables": "fp16"},
        lambda: (good_ids("folded, int64", 40),),
    ),
    "weights drawn when needed": (
        lambda: faces.network(latent=8, channels=(8, 4, 3), start=4),
        {},
        lambda: (rows(3, 8),),
    ),
}


def compiled(case):
    make, settings, given = CASES[case]
    return onchip.compile(make(), **{"device": "cpu", **settings}), given()


def bits(results):
    return [y.tobytes() for y in (results if isinstance(results, tuple) else (results,))]


WAYS = {"pickle": lambda engine: pickle.loads(pickle.dumps(engine)), "copy": copy.copy, "deepcopy": copy.deepcopy}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("way", WAYS)
def test_a_copy_gives_the_same_bits(case, way):
    engine, given = compiled(case)
    twin = WAYS[way](engine)
    assert twin is not engine
    assert bits(twin(*given)) == bits(engine(*given))
    assert str(twin.plan) == str(engine.plan)
    assert repr(twin) == repr(engine)
    again = WAYS[way](twin)
    assert bits(again(*given)) == bits(engine(*given))


def test_a_deep_copy_shares_no_weights():
    engine, _ = compiled("mlp")
    twin = copy.deepcopy(engine)
    for name, weight in engine.plan.network.weights.items():
        assert not np.shares_memory(weight, twin.plan.network.weights[name])


LOAD = """
import pickle, sys
with open(sys.argv[1], "rb") as file:
    loaded = pickle.load(file)
results = [engine(*given) for engine, given in loaded]
with open(sys.argv[2], "wb") as file:
    pickle.dump(results, file)
"""


def test_a_fresh_process_gives_the_same_bits(tmp_path):
    engines = [compiled(case) for case in CASES]
    (tmp_path / "engines").write_bytes(pickle.dumps(engines))
    here = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    script = [sys.executable, "-c", LOAD, tmp_path / "engines", tmp_path / "results"]
    ran = subprocess.run(script, capture_output=True, text=True, env=here, check=False)
    assert ran.returncode == 0, ran.stderr
    results = pickle.loads((tmp_path / "results").read_bytes())
    for (engine, given), result in zip(engines, results, strict=True):
        assert bits(result) == bits(engine(*given))


def test_processes_take_an_engine_as_an_argument_and_as_a_function():
    engine, (x,) = compiled("one thread")
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert bits(pool.apply(engine, (x,))) == bits(engine(x))
    found = joblib.Parallel(n_jobs=2)(joblib.delayed(engine)(part) for part in (x[:20], x[20:]))
    assert bits(np.concatenate(found)) == bits(engine(x))


# -- plans that would compute other bits -------------------------------------------------------------------------


def test_rates_that_were_measured_since_change_no_plan(monkeypatch):
    slow = dataclasses.replace(this_cpu(), flops={"fp32": 1e6})  # so few rows are worth a fold
    monkeypatch.setattr(placement, "this_cpu", lambda: slow)
    net = text_network("folded, int64")
    engine = onchip.compile(net, device="cpu", batch_hint=100)
    pickled = pickle.dumps(engine)
    fast = dataclasses.replace(slow, flops={"fp32": 1e15}, bandwidth=1.0)  # and here none are
    monkeypatch.setattr(placement, "this_cpu", lambda: fast)
    assert str(onchip.compile(net, device="cpu", batch_hint=100).plan) != str(engine.plan)
    loaded, ids = pickle.loads(pickled), good_ids("folded, int64", 40)
    assert str(loaded.plan) == str(engine.plan)
    assert bits(loaded(ids)) == bits(engine(ids))


def test_another_kind_of_device_is_refused(monkeypatch):
    pickled = pickle.dumps(compiled("mlp")[0])
    other = dataclasses.replace(this_cpu(), arch="another, 64-bit vectors")
    monkeypatch.setattr(placement, "this_cpu", lambda: other)
    with pytest.raises(DeviceError, match="another kind of device") as caught:
        pickle.loads(pickled)
    assert other.arch in caught.value.got
    assert "onchip.compile" in caught.value.hint


def test_a_plan_that_no_kernel_takes_any_more_is_refused(monkeypatch):
    pickled = pickle.dumps(compiled("mlp")[0])
    fewer = [kernel for kernel in engine_module.kernels_for(this_cpu()) if kernel.name == "plain"]
    monkeypatch.setattr(engine_module, "kernels_for", lambda device: fewer)
    with pytest.raises(PlanError, match="as planned") as caught:
        pickle.loads(pickled)
    assert "mlp_fused" in caught.value.got


def test_a_device_can_be_pickled():
    assert pickle.loads(pickle.dumps(H200)) == H200
