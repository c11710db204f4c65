"""Random networks: every engine stays within tolerance, and the GPU supports a minimum share of them."""

import functools
import hashlib

import numpy as np
import pytest

from onchip.network.graph import Network, Node
from onchip.network.layers import LAYERS, Linear
from onchip.network.types import TensorType
from onchip.plan.device import H200
from onchip.plan.kernel import Job
from onchip.plan.planner import make_plan
from onchip.runtime.engine import compile
from onchip.runtime.placement import kernels_for
from random_layers import MAKERS
from random_networks import judge_many, random_network, verify

SEEDS = range(300)
CPU_SEEDS = range(120)
GPU_PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
network = functools.cache(random_network)

# Digest of the networks of SEEDS: it changes with the generator.
DIGEST = "2af5c8637591f141"


# -- the generator ---------------------------------------------------------------------------------------------


def test_the_same_seed_is_the_same_network_everywhere():
    looks = [
        (node.name, node.layer.kind, *node.inputs, str(net.types[node.name]))
        for net in map(network, SEEDS)
        for node in net.nodes
    ]
    assert hashlib.sha256(repr(looks).encode()).hexdigest()[:16] == DIGEST
    for seed in (0, 1, 2):
        one, two = random_network(seed), random_network(seed)
        assert one.weights.keys() == two.weights.keys()
        assert all(np.array_equal(one.weights[name], two.weights[name]) for name in one.weights)


def test_every_kind_of_layer_grows():
    assert set(MAKERS) == set(LAYERS.values()), "a kind of layer without a maker in tests/random_layers.py"
    kinds = [type(node.layer) for seed in SEEDS for node in network(seed).nodes]
    assert {kind.__name__: kinds.count(kind) for kind in MAKERS if kinds.count(kind) < 3} == {}


def is_mixed(net):
    return len({given.dtype for given in net.types.values() if "float" in given.dtype}) > 1


def reads_ids(net):
    return any(given.dtype in ("int32", "int64") for given in net.inputs.values())


@pytest.mark.parametrize(
    ("share", "holds"),
    [
        (0.4, lambda net: len(net.inputs) > 1),
        (0.5, lambda net: len(net.outputs) > 1),
        (0.25, lambda net: any(len(net.readers(value)) > 1 for value in net.by_name)),
        (0.15, lambda net: any(net.readers(name) for name in net.outputs if name in net.by_name)),
        (0.05, lambda net: any(name in net.inputs for name in net.outputs)),
        (0.04, lambda net: len(set(net.outputs)) < len(net.outputs)),
        (0.04, lambda net: any(not net.readers(name) and name not in net.outputs for name in net.by_name)),
        (0.2, reads_ids),
        (0.1, is_mixed),
        *((0.08, lambda net, d=d: any(t.dtype == d for t in net.types.values())) for d in ("float16", "bfloat16")),
        *((0.3, lambda net, rank=rank: any(len(t.shape) == rank for t in net.types.values())) for rank in (2, 3, 4)),
        *((0.1, lambda net, n=n: any(n in t.row_shape for t in net.types.values())) for n in (1, 3, 5, 7, 17, 33)),
        (0.3, lambda net: len(net.nodes) >= 8),
    ],
    ids=[
        "inputs", "outputs", "shared", "output that is read", "input that is an output", "output twice", "unread",
        "ids", "mixed dtypes", "float16", "bfloat16", "rank 2", "rank 3", "rank 4", "1", "3", "5", "7", "17", "33",
        "deep",
    ],
)  # fmt: skip
def test_networks_are_of_many_kinds(share, holds):
    assert sum(bool(holds(network(seed))) for seed in SEEDS) >= share * len(SEEDS)


# -- the check -------------------------------------------------------------------------------------------------


def wrong_engine(monkeypatch, change):
    """The verdict on an engine whose result is `change(y, number of rows, threads)`."""
    net = Network(
        {"x": TensorType(("B", 5))}, (Node("y", Linear(), ("x",), {"weight": "w"}),), ("y",),
        {"w": np.random.default_rng(0).standard_normal((3, 5), dtype=np.float32)},
    )  # fmt: skip

    def compile_wrong(*given, threads=None, **options):
        engine = compile(*given, threads=threads, **options)

        def run(x):
            return change(engine(x), len(x), threads)

        run.plan = engine.plan
        return run

    monkeypatch.setattr("random_networks.compile", compile_wrong)
    return verify(net, 0)


def test_a_right_engine_is_right(monkeypatch):
    assert wrong_engine(monkeypatch, lambda y, B, threads: y) == ""


@pytest.mark.parametrize(
    ("told", "change"),
    [
        ("error", lambda y, B, threads: y * np.float32(1 + 1e-5)),
        ("error inf", lambda y, B, threads: np.nan_to_num(y, nan=1.0, posinf=np.inf, neginf=-np.inf)),
        ("error inf", lambda y, B, threads: np.where(np.isinf(y), -y, y)),
        ("batch of 2", lambda y, B, threads: np.nextafter(y, np.float32(9)) if B == 2 else y),
        ("another place", lambda y, B, threads: np.where(np.arange(B)[:, None] == 3, y + y / 2**23, y)),
        ("one thread", lambda y, B, threads: np.nextafter(y, np.float32(9)) if threads == 1 else y),
    ],
)
def test_a_wrong_engine_is_found_and_can_be_seen_again(monkeypatch, told, change):
    verdict = wrong_engine(monkeypatch, change)
    assert told in verdict
    assert "python tests/random_networks.py 0 --device cpu --precision fp32" in verdict


# -- the engines -----------------------------------------------------------------------------------------------


@pytest.mark.sample(4)
@pytest.mark.parametrize("seed", CPU_SEEDS)
def test_the_cpu_is_right(seed):
    verdict = verify(network(seed), seed)
    assert not verdict, verdict


@pytest.mark.sample(4)
@pytest.mark.parametrize("seed", SEEDS[:200])
def test_the_gpu_takes_every_network(seed):
    for precision in GPU_PRECISIONS:
        make_plan(network(seed), H200, kernels_for(H200), Job(precision))  # PlanError for an unsupported layer


@pytest.mark.gpu
@pytest.mark.parametrize("precision", GPU_PRECISIONS)
def test_the_gpu_is_right(precision):
    verdicts = judge_many(SEEDS, "cuda", precision)
    assert not verdicts, "\n\n".join(verdicts)
