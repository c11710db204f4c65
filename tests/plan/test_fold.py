"""Folding an embedding: one-time work for less work per row, where that pays."""

import re
from dataclasses import replace
from itertools import pairwise

import pytest

from onchip.errors import PlanError
from onchip.kernels.cpu import KERNELS
from onchip.network.build import mlp
from onchip.network.graph import Network, Node
from onchip.network.layers import (
    GELU,
    BatchNorm1d,
    Concat,
    Conv1d,
    Embedding,
    GlobalMax,
    Linear,
    Permute,
    ReLU,
    TokenConv,
)
from onchip.network.types import TensorType
from onchip.plan.device import H200, Device
from onchip.plan.host_costs import HOST
from onchip.plan.kernel import Job
from onchip.plan.planner import make_plan
from onchip.runtime import placement
from python_calls import python_calls
from takers import CPU, TakeBut, stored


def sentiment(V=21_635, E=4_096, C=1_024, S=16, kernels=(3, 5, 7, 9), hidden=(2048, 1024, 512, 2)) -> Network:
    """As large as the real network, with weights that planning must not read."""
    nodes = [Node("emb", Embedding(), ("ids",), {"weight": "table"}), Node("turn", Permute((0, 2, 1)), ("emb",))]
    weights = {"table": stored(V, E)}
    for K in kernels:
        weights |= {f"w{K}": stored(C, E, K), f"b{K}": stored(C)}
        nodes += [
            Node(f"conv{K}", Conv1d(), ("turn",), {"weight": f"w{K}", "bias": f"b{K}"}),
            Node(f"relu{K}", ReLU(), (f"conv{K}",)),
            Node(f"max{K}", GlobalMax((-1,)), (f"relu{K}",)),
        ]
    nodes.append(Node("concat", Concat(1), tuple(f"max{K}" for K in kernels)))
    for i, (D_in, D_out) in enumerate(pairwise((C * len(kernels), *hidden))):
        weights |= {f"fc{i}.weight": stored(D_out, D_in), f"fc{i}.bias": stored(D_out)}
        nodes.append(Node(f"fc{i}", Linear(), (nodes[-1].name,), {r: f"fc{i}.{r}" for r in ("weight", "bias")}))
        nodes += [Node(f"relu_fc{i}", ReLU(), (f"fc{i}",))] if i < len(hidden) - 1 else []
    ids = {"ids": TensorType(("B", S), "int32")}
    return Network(ids, tuple(nodes), (nodes[-1].name,), weights, "sentiment")


def tables(plan) -> list[tuple[int, ...]]:
    net = plan.network
    return [net.weights[n.weights["weight"]].shape for n in net.nodes if isinstance(n.layer, TokenConv)]


def pays_from(plan) -> int:
    return int(re.search(r"pays off at ([\d,]+) rows or more", str(plan))[1].replace(",", ""))


def test_the_whole_sentiment_network_is_planned_at_once_and_folded():
    net = sentiment()
    plan = placement.plan(net, "h200", Job(batch=16_384))
    assert python_calls(lambda: placement.plan(net, "h200", Job(batch=16_384))) < 250_000
    assert tables(plan) == [(21_635, K, 1_024) for K in (3, 5, 7, 9)]
    assert not [node for node in plan.network.nodes if isinstance(node.layer, Embedding | Conv1d)]
    flop = 2 * 21_635 * 24 * 1_024 * 4_096
    assert plan.rewrite_flop == flop
    assert f"{flop:,} flop to build them" in str(plan)
    assert plan.rewrites[0] == "folded emb into conv3: 3 tables of 21,635 x 1,024 instead of a gemm"
    build = r"folded: tables of 2.0 GiB take 4,355,700,817,920 flop \(4\d\.\d+ ms\) to build, which pays off at "
    assert re.match(build, plan.fold)
    assert 1_000 < pays_from(plan) < 10_000
    assert plan.fold in str(plan)
    assert plan.to_dict()["fold"] == plan.fold


def test_a_few_sentences_are_not_worth_the_tables():
    few, many = (placement.plan(sentiment(), "a100", Job(batch=batch)) for batch in (16, 16_384))
    assert tables(few) == []
    assert few.rewrite_flop == 0
    assert few.fold.startswith("not folded: ")
    assert few.fold.endswith("this job has 16")
    assert tables(many)
    assert 16 < pays_from(few) < 16_384
    assert 16 < pays_from(many) < 16_384  # by the time per row with many rows: blocks are full then


def test_a_user_may_leave_the_fold_out():
    plan = placement.plan(sentiment(), "h200", Job(batch=16_384, without=("fold",)))
    assert tables(plan) == []
    assert plan.fold == ""
    assert plan.rewrites == ()


def test_half_tables_halve_what_is_looked_up():
    full, half = (placement.plan(sentiment(), "h200", Job(batch=16_384, tables=kind)) for kind in ("fp32", "fp16"))
    saved = full.groups[0].claim.cost.row_bytes - half.groups[0].claim.cost.row_bytes
    assert saved == 244 * 1_024 * 2  # of all four convolutions


@pytest.mark.parametrize("device", ["two cores", "h200"])
@pytest.mark.parametrize("kind", ["fp16", "bf16"])
def test_half_tables_are_counted_as_they_are_kept(device, kind):
    where, kernels = (CPU, KERNELS) if device == "two cores" else (H200, ())
    net, V, C = sentiment(V=21_632, E=64, C=1_024), 21_632, 1_024
    full, half = (
        make_plan(net, where, kernels, Job(batch=10**9, tables=tables), whole=False) for tables in ("fp32", kind)
    )
    assert full.weight_bytes - half.weight_bytes == V * 24 * C * 2
    for plan, size in ((full, "2.0 GiB"), (half, "1014.0 MiB")):
        assert plan.fold.startswith(f"folded: tables of {size} take ")
        assert plan.tables_unused == ""
    assert half.to_dict()["tables"] == kind
    assert "tables are not used" not in str(half)


def test_half_tables_that_nobody_uses_are_told():
    few = placement.plan(sentiment(), "a100", Job(batch=16, tables="fp16"))
    assert f"{few.fold}\nfp16 tables are not used: {few.tables_unused}\n" in str(few)
    assert few.to_dict()["tables_unused"] == few.tables_unused
    plain = make_plan(mlp(4, 3), CPU, KERNELS, Job(tables="bf16"))
    assert "bf16 tables are not used" in str(plain)
    assert "tables" not in str(make_plan(mlp(4, 3), CPU, KERNELS))


def test_half_tables_that_no_kernel_keeps_so_are_told():
    nodes = (Node("t", TokenConv(), ("ids",), {"weight": "T"}),)  # without a maximum NumPy runs it, in float32
    net = Network({"ids": TensorType(("B", 6), "int32")}, nodes, ("t",), {"T": stored(9, 3, 5)})
    plan = make_plan(net, CPU, KERNELS, Job(tables="fp16"))
    assert "fp16 tables are not used: no kernel" in str(plan)


@pytest.mark.parametrize(("E", "folds"), [(16, False), (64, False), (2048, True)])
def test_an_embedding_is_folded_for_numpy_only_where_that_is_faster(E, folds):
    """A GELU before the maximum leaves the tables to NumPy. Measured on two cores, rows of 16 tokens, 3 taps, 128
    channels: direct 6 us and folded 44 us per row at E = 64, 122 and 34 us at E = 2048 (5 taps)."""
    nodes = (
        Node("emb", Embedding(), ("ids",), {"weight": "table"}), Node("turn", Permute((0, 2, 1)), ("emb",)),
        Node("conv", Conv1d(), ("turn",), {"weight": "w"}), Node("gelu", GELU(), ("conv",)),
        Node("max", GlobalMax((-1,)), ("gelu",)),
    )  # fmt: skip
    weights = {"table": stored(10_000, E), "w": stored(128, E, 3)}
    net = Network({"ids": TensorType(("B", 16), "int32")}, nodes, ("max",), weights)
    plan = make_plan(net, replace(CPU, flops={"fp32": 311e9}, bandwidth=50e9), KERNELS, Job(batch=10**9))
    assert bool(tables(plan)) == folds, str(plan)


def floor(device: Device, B: int, *works: tuple[float, float, float]) -> float:
    """Seconds for layers of (flop per row, bytes per row, bytes once), one launch each."""
    flops = device.flops["fp32"]
    each = (max(flop * B / flops, (row * B + fixed) / device.bandwidth) for flop, row, fixed in works)
    return sum(each) + len(works) * device.launch_us * 1e-6


@pytest.mark.parametrize("flops", [1e9, 20e9, 500e9])
@pytest.mark.parametrize("bandwidth", [1e9, 20e9, 400e9])
@pytest.mark.parametrize("E", [2, 8, 64])
def test_the_break_even_is_right(flops, bandwidth, E):
    V, S, K, C = 500, 9, 3, 16
    device = replace(CPU, flops={"fp32": flops}, bandwidth=bandwidth)
    net = sentiment(V, E, C, S, kernels=(K,), hidden=(2,))
    P = S - K + 1
    behind = [  # ReLU, GlobalMax, Linear; the Concat of one is dropped
        (P * C, 8 * P * C, 0),
        (P * C, 4 * (P * C + C), 0),
        (4 * C + 2, 4 * (C + 2), 4 * (2 * C + 2)),
    ]
    direct = [
        (0, 4 * S + 4 * S * E + 4 * S * E, 0),  # ids, rows looked up, rows written
        (0, 8 * S * E, 0),
        (P * C * (2 * E * K + 1), 4 * (S * E + P * C), 4 * (C * E * K + C)),
        *behind,
    ]
    folded = [(P * C * K, 4 * S + 4 * P * K * C + 4 * P * C, 4 * C), *behind]
    build = 2 * V * K * E * C / flops + 4 * V * K * C / HOST.write_bandwidth

    def gain(B):
        return floor(device, B, *direct) - floor(device, B, *folded) - build

    seen = [make_plan(net, device, [], Job(batch=batch), whole=False) for batch in (1, 1000, 10**7)]
    if gain(10**12) <= 0:
        assert all("the time per row would not drop" in plan.fold and not tables(plan) for plan in seen)
        return
    numbers = {pays_from(plan) for plan in seen}
    assert len(numbers) == 1, "the break-even does not depend on the job"
    (first,) = numbers
    assert gain(first) > -1e-15  # rounding
    assert first == 1 or gain(first - 1) <= 1e-15
    for plan in seen:
        assert bool(tables(plan)) == (plan.job.batch >= first)
    assert tables(make_plan(net, device, [], Job(batch=first), whole=False))
    assert first == 1 or not tables(make_plan(net, device, [], Job(batch=first - 1), whole=False))


def test_what_is_built_either_way_is_not_the_folds():
    """The norm is folded into the convolution with and without tables."""
    V, E, C, K, S = 50, 8, 4, 3, 9
    roles = {role: f"n.{role}" for role in ("mean", "var")}
    nodes = (
        Node("emb", Embedding(), ("ids",), {"weight": "table"}),
        Node("turn", Permute((0, 2, 1)), ("emb",)),
        Node("conv", Conv1d(), ("turn",), {"weight": "w"}),
        Node("n", BatchNorm1d(), ("conv",), roles),
    )
    weights = {"table": stored(V, E), "w": stored(C, E, K), "n.mean": stored(C), "n.var": stored(C)}
    net = Network({"ids": TensorType(("B", S), "int64")}, nodes, ("n",), weights)
    plan = make_plan(net, CPU, [], Job(batch=10**9), whole=False)
    assert len(tables(plan)) == 1
    assert f"take {2 * V * K * E * C:,} flop" in plan.fold
    assert plan.rewrite_flop == 2 * V * K * E * C + C * E * K + 2 * C


def test_tables_that_do_not_fit_are_not_built():
    net = sentiment(V=1000, E=256, C=64)
    small = replace(CPU, memory_bytes=10 << 20)
    plan = make_plan(net, small, [], Job(batch=10**9), whole=False)
    assert tables(plan) == []
    needed = 4 * (1000 * 24 * 64 + 4 * 64 + sum(a * b + b for a, b in pairwise((256, 2048, 1024, 512, 2))))
    why = f"all weights would take {needed / 2**20:.1f} MiB of the 10.0 MiB that two cores has, more than half"
    assert plan.fold == f"not folded: {why}"
    assert tables(make_plan(net, replace(CPU, memory_bytes=2 * needed), [], Job(batch=10**9), whole=False))
    assert tables(make_plan(net, replace(CPU, memory_bytes=0), [], Job(batch=10**9), whole=False))


def test_a_version_that_no_kernel_runs_is_not_chosen():
    net = sentiment(V=50, E=8, C=4, hidden=(2,))
    direct = make_plan(net, CPU, [TakeBut(TokenConv)], Job(batch=10**9))
    assert direct.fold.startswith("not folded")
    assert "'conv3' (TokenConv)" in direct.fold
    folded = make_plan(net, CPU, [TakeBut(Conv1d)], Job(batch=1))
    assert folded.fold.startswith("folded")
    assert "'conv3' (Conv1d)" in folded.fold
    assert len(tables(folded)) == 4
    with pytest.raises(PlanError, match="supports layer 'relu3'"):
        make_plan(net, CPU, [TakeBut(ReLU)])
