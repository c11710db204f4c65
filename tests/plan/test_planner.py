"""Plans as text, the cheapest cover, refusals with reasons, and planning that computes nothing."""

import itertools
import re
import time
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from checks import random_mlp
from onchip.errors import DeviceError, InputError, PlanError
from onchip.kernels.cpu import KERNELS
from onchip.plan.device import H200, KNOWN, Device
from onchip.plan.kernel import Claim, Job, Price, Refusal
from onchip.plan.planner import make_plan
from onchip.runtime import engine
from onchip.spec.build import mlp, sequential
from onchip.spec.layers import (
    GELU,
    Add,
    BatchNorm1d,
    Concat,
    Conv1d,
    Conv2d,
    Dropout,
    Embedding,
    GlobalMax,
    Linear,
    Permute,
    ReLU,
    Reshape,
    Sigmoid,
    Softmax,
    TokenConv,
)
from onchip.spec.network import Network, Node
from onchip.spec.recipe import Recipe
from onchip.spec.types import TensorType

CPU = Device(
    name="two cores", kind="cpu", arch="x86_64", units=2, flops={"fp32": 270e9}, bandwidth=20e9, launch_us=3.0,
    fast_bytes=2 << 20, memory_bytes=8 << 30, source="made up for the tests", vector_bytes=64,
)  # fmt: skip


class Take:
    """A kernel that claims runs of given lengths at a given price."""

    device_kind, precisions = "cpu", ("fp32",)

    def __init__(self, name: str, *lengths: int, flop: int = 100) -> None:
        self.name, self.lengths, self.price = name, lengths, Price(flop, 8)

    def claims(self, net, start, device, job):
        for length in self.lengths:
            names = tuple(node.name for node in net.nodes[start : start + length])
            if len(names) == length:
                yield Claim(self.name, f"{self.name}<{length}>", names, self.price, "the test says so")
            else:
                yield Refusal(self.name, net.nodes[start].name, f"needs {length} layers")


class TakeBut(Take):
    """Takes every layer but one kind."""

    def __init__(self, kind: type) -> None:
        super().__init__(f"all but {kind.__name__}", 1)
        self.kind = kind

    def claims(self, net, start, device, job):
        if not isinstance(net.nodes[start].layer, self.kind):
            yield from super().claims(net, start, device, job)


def three_layers() -> Network:
    return sequential(TensorType(("B", 4)), [("a", ReLU()), ("b", Sigmoid()), ("c", ReLU())], {})


def test_the_cheapest_cover_wins():
    plan = make_plan(three_layers(), CPU, [Take("single", 1), Take("pair", 2)])
    assert [g.claim.nodes for g in plan.groups] in ([("a",), ("b", "c")], [("a", "b"), ("c",)])
    dear = make_plan(three_layers(), CPU, [Take("single", 1), Take("pair", 2, flop=10**9)])
    assert [g.claim.kernel for g in dear.groups] == ["single"] * 3
    assert make_plan(three_layers(), CPU, [Take("single", 1), Take("all", 3)]).between_bytes == 0


def test_a_refusal_is_told_with_its_reason():
    plan = make_plan(three_layers(), CPU, [Take("single", 1), Take("four", 4)])
    assert "refused: four at a: needs 4 layers" in str(plan)
    with pytest.raises(PlanError, match="no kernel of two cores takes layer 'a'") as error:
        make_plan(three_layers(), CPU, [Take("four", 4)])
    assert "needs 4 layers" in str(error.value)


def test_the_layer_that_no_kernel_takes_is_the_one_that_is_named():
    net = sequential(TensorType(("B", 4)), [("a", ReLU()), ("b", Sigmoid()), ("c", ReLU())], {})
    with pytest.raises(PlanError, match=r"no kernel of two cores takes layer 'b' \(Sigmoid\)"):
        make_plan(net, CPU, [TakeBut(Sigmoid)])


def test_groups_know_what_flows_between_them():
    plan = make_plan(three_layers(), CPU, [Take("single", 1)])
    assert [(g.inputs, g.outputs) for g in plan.groups] == [(("x",), ("a",)), (("a",), ("b",)), (("b",), ("c",))]
    assert plan.between_bytes == 2 * 4 * 4


def test_kernels_of_other_devices_are_not_asked():
    with pytest.raises(PlanError):
        make_plan(three_layers(), H200, [Take("single", 1)])


def test_a_precision_that_the_device_lacks():
    with pytest.raises(DeviceError, match="does not compute in fp16"):
        make_plan(three_layers(), CPU, [Take("single", 1)], Job("fp16"))


def test_printed_plan():
    # Widths of whole vectors on every CPU: the padding of others, and so the bytes of weights, is the machine's.
    plan = make_plan(mlp(72, 64, 64, 16, bias=False, name="decode"), CPU, KERNELS, Job(batch=12_800))
    assert str(plan) == (
        "decode on two cores, fp32, infer, 12,800 rows\n"
        "group  layers    kernel                       on chip  bytes/row  flop/row     floor  why\n"
        "0      fc1..fc3  mlp_fused<72,64,64,16,ReLU>   32 KiB        352    19,584  931.4 µs  "
        "64 rows at a time stay in 32 KiB of cache, layer after layer\n"
        "floor 931.4 µs, 0 B/row between groups, 39 KiB of weights, 0 flop to build them"
    )


def test_printed_plan_of_training():
    net = mlp(784, 320, 160, 10, name="digits")
    text = str(make_plan(net, CPU, KERNELS, Job(batch=64, loss="cross_entropy")))
    assert text.startswith("digits on two cores, fp32, train, cross_entropy, 64 rows\n")
    assert "mlp_train<784,320,160,10,ReLU,cross_entropy>" in text


@pytest.mark.parametrize(
    ("net", "reason"),
    [
        (mlp(4, 3, output="Softmax"), "train without it"),
        (mlp(4, 3, output="Sigmoid"), "takes logits"),
        (three_layers(), "whole MLP chain"),
    ],
    ids=["softmax", "sigmoid", "no linear"],
)
def test_training_refuses_what_it_cannot_train(net, reason):
    with pytest.raises(PlanError, match=reason):
        make_plan(net, CPU, KERNELS, Job(loss="cross_entropy"))


def never(*_):
    raise AssertionError("a weight was computed while planning")


def stored(*shape: int) -> Recipe:
    """A weight that must not be looked at."""
    return Recipe("stored", (), shape, "float32", 0, never)


def test_planning_never_computes_a_weight():
    huge = {"a.weight": Recipe("table", (), (4096, 1_000_000), "float32", 10**12, never)}
    net = sequential(TensorType(("B", 1_000_000)), [("a", Linear()), ("r", ReLU())], huge)
    start = time.process_time()
    plan = make_plan(net, CPU, KERNELS)
    assert time.process_time() - start < 0.2
    assert plan.groups[0].claim.weight_bytes >= 4 * 4096 * 1_000_000


def test_what_a_rewrite_derives_is_priced():
    weights = {"a.weight": np.ones((8, 2), np.float32), "b.weight": np.ones((3, 8), np.float32)}
    plan = make_plan(sequential(TensorType(("B", 2)), [("a", Linear()), ("b", Linear())], weights), CPU, KERNELS)
    assert plan.rewrite_flop == 2 * 3 * 8 * 2
    assert "96 flop to build them" in str(plan)


def test_an_unknown_optimiser_is_refused():
    with pytest.raises(InputError, match="unknown optimiser"):
        Job(loss="mse", optimiser="adagrad")


def test_every_known_device_has_a_source():
    for device in KNOWN.values():
        assert device.source
        assert device.kind == "cuda"
        assert device.flops["fp32"] > 0


def test_floor_is_compute_or_memory_whichever_is_longer():
    slow_memory = replace(CPU, bandwidth=1.0)
    price = Price(row_flop=270, row_bytes=8, fixed_bytes=4)
    assert price.floor_us(CPU, "fp32", 10**6) == pytest.approx(1000 + 3)
    assert price.floor_us(slow_memory, "fp32", 1) == pytest.approx(12e6 + 3)


def test_json_says_what_the_text_says():
    plan = make_plan(random_mlp(6, 5, 4), CPU, KERNELS)
    told = plan.to_dict()
    assert told["groups"][0]["kernel"] in str(plan)
    assert told["floor_us"] == pytest.approx(plan.floor_us)


def test_reshape_then_softmax_over_another_axis_is_its_own_group():
    weights = {"a.weight": np.ones((6, 4), np.float32)}
    layers = [("a", Linear()), ("split", Reshape((2, 3))), ("s", Softmax())]
    plan = make_plan(sequential(TensorType(("B", 4)), layers, weights), CPU, KERNELS)
    assert [g.claim.nodes for g in plan.groups] == [("a", "split"), ("s",)]


def test_groups_of_a_network_with_branches():
    nodes = [
        Node("a", ReLU(), ("x",)),
        Node("b", Sigmoid(), ("a",)),
        Node("c", Add(), ("a", "b", "x", "a")),
        Node("d", ReLU(), ("c",)),
    ]
    net = Network({"x": TensorType(("B", 4))}, nodes, ("d", "a"), {})
    plan = make_plan(net, CPU, [Take("pair", 2)])
    assert [(g.inputs, g.outputs) for g in plan.groups] == [(("x",), ("a", "b")), (("a", "b", "x"), ("d",))]
    assert plan.between_bytes == 4 * 4  # b; a is an output and is written anyway


def test_the_recipes_behind_a_recipe_are_priced_too():
    """A norm folded into a Linear that is then merged with the one behind it."""
    weights = {"a.weight": stored(8, 2), "n.mean": stored(8), "n.var": stored(8), "b.weight": stored(3, 8)}
    net = sequential(TensorType(("B", 2)), [("a", Linear()), ("n", BatchNorm1d()), ("b", Linear())], weights)
    plan = make_plan(net, CPU, KERNELS)
    assert plan.rewrites == ("folded n into a", "merged a into b: 2-8-3 is one 2-3")
    norm, product, bias = 8 * 2 + 2 * 8, 2 * 3 * 8 * 2, 2 * 3 * 8
    assert plan.rewrite_flop == norm + product + bias


def test_a_long_network_is_planned_at_once():
    layers, weights = [], {}
    for i in range(60):
        layers += [(f"l{i}", Linear()), (f"n{i}", BatchNorm1d()), (f"d{i}", Dropout()), (f"m{i}", Linear())]
        layers += [(f"r{i}", ReLU())]
        weights |= {f"l{i}.weight": stored(8, 8), f"m{i}.weight": stored(8, 8)}
        weights |= {f"n{i}.mean": stored(8), f"n{i}.var": stored(8)}
    net = sequential(TensorType(("B", 8)), layers, weights)
    start = time.process_time()
    plan = make_plan(net, CPU, [Take("single", 1)])
    assert time.process_time() - start < 0.3
    assert len(plan.groups) == 120
    assert len(plan.rewrites) == 180


class Counted(Take):
    """Notes where it is asked."""

    def __init__(self, name: str, *lengths: int, flop: int = 100) -> None:
        super().__init__(name, *lengths, flop=flop)
        self.asked: list[int] = []

    def claims(self, net, start, device, job):
        self.asked.append(start)
        yield from super().claims(net, start, device, job)


def row_of(count: int) -> Network:
    return sequential(TensorType(("B", 4)), [(f"r{i}", ReLU()) for i in range(count)], {})


def test_nobody_is_asked_where_no_claim_leads():
    pair = Counted("pair", 2)
    assert len(make_plan(row_of(10), CPU, [pair]).groups) == 5
    assert pair.asked == [0, 2, 4, 6, 8]


def test_nobody_is_asked_where_it_is_too_late_to_be_cheaper():
    """All ten for 8 launches: a single one for 3 of them may begin three times, never a fourth."""
    whole, single = Counted("whole", 10, flop=0), Counted("single", 1, flop=0)
    whole.price, single.price = Price(0, 0, launches=8), Price(0, 0, launches=3)
    plan = make_plan(row_of(10), CPU, [whole, single])
    assert [group.claim.kernel for group in plan.groups] == ["whole"]
    assert single.asked == [0, 1, 2]


@given(data=st.data())
def test_no_cover_is_cheaper(data):
    """Against every way to cut the network, at random prices."""
    count = data.draw(st.integers(1, 6))
    runs = [(start, end) for start in range(count) for end in range(start + 1, count + 1)]
    prices = data.draw(st.dictionaries(st.sampled_from(runs), st.integers(1, 20)))
    kernel = Priced(prices)
    cuts = (c for n in range(count) for c in itertools.combinations(range(1, count), n))
    covers = [list(pairwise((0, *cut, count))) for cut in cuts]
    costs = [sum(prices[run] for run in cover) for cover in covers if all(run in prices for run in cover)]
    if not costs:
        with pytest.raises(PlanError):
            make_plan(row_of(count), CPU, [kernel])
        return
    plan = make_plan(row_of(count), CPU, [kernel])
    assert sum(group.claim.price.launches for group in plan.groups) == min(costs)
    assert [name for group in plan.groups for name in group.claim.nodes] == [f"r{i}" for i in range(count)]


class Priced:
    """Claims runs of nodes for so many launches each."""

    name, device_kind, precisions = "priced", "cpu", ("fp32",)

    def __init__(self, prices: dict[tuple[int, int], int]) -> None:
        self.prices = prices

    def claims(self, net, start, device, job):
        for (first, end), launches in self.prices.items():
            if first == start:
                names = tuple(node.name for node in net.nodes[start:end])
                yield Claim(self.name, self.name, names, Price(0, 0, launches=launches), "the test says so")


def test_the_layer_where_every_way_ends_is_named():
    with pytest.raises(PlanError, match="takes layer 'c'") as error:
        make_plan(three_layers(), CPU, [Take("pair", 2)])
    assert "pair: needs 2 layers" in str(error.value)


@pytest.mark.parametrize("kind", ["convolutions", "mlp"])
def test_a_deep_network_is_planned_at_once(kind):
    layers, weights = [], {}
    for i in range(200 if kind == "convolutions" else 150):
        layers += [(f"l{i}", Conv2d(pads=(1, 1, 1, 1)) if kind == "convolutions" else Linear()), (f"r{i}", ReLU())]
        weights[f"l{i}.weight"] = stored(8, 8, 3, 3) if kind == "convolutions" else stored(8, 8)
    net = sequential(TensorType(("B", 8, 8, 8)) if kind == "convolutions" else TensorType(("B", 8)), layers, weights)
    make_plan(mlp(4, 3), CPU, KERNELS)
    start = time.process_time()
    plan = make_plan(net, CPU, KERNELS)
    assert time.process_time() - start < (1.0 if kind == "convolutions" else 0.2)
    assert len(plan.groups) == 1


# -- layers that no kernel takes yet ---------------------------------------------------------------------------


def test_a_device_that_is_only_known_may_lack_kernels():
    net = sequential(TensorType(("B", 4)), [("a", Linear()), ("b", Sigmoid())], {"a.weight": stored(3, 4)})
    with pytest.raises(PlanError):
        make_plan(net, CPU, [])
    plan = make_plan(net, CPU, [], Job(batch=10**6), whole=False)
    assert [group.claim.label for group in plan.groups] == ["none yet for Linear", "none yet for Sigmoid"]
    first, second = (group.claim.price for group in plan.groups)
    assert (first.row_flop, first.row_bytes, first.fixed_bytes) == (24, 4 * (4 + 3), 4 * 12)
    assert (second.row_flop, second.row_bytes, second.fixed_bytes) == (60, 4 * (3 + 3), 0)
    assert plan.floor_us == pytest.approx((28e6 + 48) / 20e9 * 1e6 + 3 + 24e6 / 20e9 * 1e6 + 3)
    assert plan.groups[0].claim.weight_bytes == 48
    assert "no kernel of this device takes it yet" in str(plan)


def test_a_layer_is_without_a_kernel_only_where_none_takes_it():
    class TakeB(Take):
        def claims(self, net, start, device, job):
            if net.nodes[start].name == "b":
                yield from super().claims(net, start, device, job)

    # Much dearer than the layer itself, and still better than no kernel.
    plan = make_plan(three_layers(), CPU, [TakeB("b", 1, flop=10**9)], whole=False)
    assert [group.claim.kernel for group in plan.groups] == ["", "b", ""]


def test_and_not_where_a_dearer_way_takes_them_all():
    class TakeFirst(Take):
        def claims(self, net, start, device, job):
            if start == 0:
                yield from super().claims(net, start, device, job)

    kernels = [TakeFirst("cheap", 1), TakeFirst("dear", 3, flop=10**9)]
    assert [g.claim.kernel for g in make_plan(three_layers(), CPU, kernels, whole=False).groups] == ["dear"]


# -- folding an embedding: work once for less work a row -------------------------------------------------------


def sentiment(V=21_635, E=4_096, C=1_024, S=16, kernels=(3, 5, 7, 9), hidden=(2048, 1024, 512, 2)) -> Network:
    """As large as the real one, with weights that must not be looked at."""
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
    return int(re.search(r"pays from ([\d,]+) rows on", str(plan))[1].replace(",", ""))


def test_the_whole_sentiment_network_is_planned_at_once_and_folded():
    net = sentiment()
    engine.plan(mlp(4, 3), "h200")  # imports
    start = time.process_time()
    plan = engine.plan(net, "h200", Job(batch=16_384))
    assert time.process_time() - start < 0.2
    assert tables(plan) == [(21_635, K, 1_024) for K in (3, 5, 7, 9)]
    assert not [node for node in plan.network.nodes if isinstance(node.layer, Embedding | Conv1d)]
    flop = 2 * 21_635 * 24 * 1_024 * 4_096
    assert plan.rewrite_flop == flop
    assert f"{flop:,} flop to build them" in str(plan)
    assert plan.rewrites[0] == "folded emb into conv3: 3 tables of 21,635 x 1,024 instead of a product"
    assert plan.fold == (
        "folded: tables of 2.0 GiB take 4,355,700,817,920 flop (85.57 ms) to build, which pays from 2,130 rows on; "
        "this job has 16,384"
    )
    assert plan.fold in str(plan)
    assert plan.to_dict()["fold"] == plan.fold


def test_a_few_sentences_are_not_worth_the_tables():
    few, many = (engine.plan(sentiment(), "h200", Job(batch=batch)) for batch in (16, 16_384))
    assert tables(few) == []
    assert few.rewrite_flop == 0
    assert few.fold.startswith("not folded: ")
    assert few.fold.endswith("this job has 16")
    assert pays_from(few) == pays_from(many)


def test_a_user_may_leave_the_fold_out():
    plan = engine.plan(sentiment(), "h200", Job(batch=16_384, without=("fold",)))
    assert tables(plan) == []
    assert plan.fold == ""
    assert plan.rewrites == ()


def test_half_tables_halve_what_is_looked_up():
    full, half = (engine.plan(sentiment(), "h200", Job(batch=16_384, tables=kind)) for kind in ("fp32", "fp16"))
    saved = full.groups[0].claim.price.row_bytes - half.groups[0].claim.price.row_bytes
    assert saved == 14 * 3 * 1_024 * 2


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
    few = engine.plan(sentiment(), "h200", Job(batch=16, tables="fp16"))
    assert few.tables_unused == "nothing was folded into any"
    assert f"{few.fold}\nfp16 tables are not used: nothing was folded into any\n" in str(few)
    assert few.to_dict()["tables_unused"] == few.tables_unused
    plain = make_plan(mlp(4, 3), CPU, KERNELS, Job(tables="bf16"))
    assert "bf16 tables are not used: nothing was folded into any" in str(plain)
    assert "tables" not in str(make_plan(mlp(4, 3), CPU, KERNELS))


def test_half_tables_that_no_kernel_keeps_so_are_told():
    nodes = (Node("t", TokenConv(), ("ids",), {"weight": "T"}),)  # without a maximum it is NumPy's, in float32
    net = Network({"ids": TensorType(("B", 6), "int32")}, nodes, ("t",), {"T": stored(9, 3, 5)})
    plan = make_plan(net, CPU, KERNELS, Job(tables="fp16"))
    assert "fp16 tables are not used: no kernel of this plan keeps them so" in str(plan)


@pytest.mark.parametrize(("E", "folds"), [(16, False), (64, False), (2048, True)])
def test_an_embedding_is_folded_for_numpy_only_where_that_is_faster(E, folds):
    """A GELU before the maximum leaves the tables to NumPy. Measured on two cores, rows of 16 tokens, 3 taps, 128
    channels: direct 6 us and folded 44 us a row at E = 64, 122 and 34 us at E = 2048 (5 taps)."""
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
    """Seconds for layers of (flop a row, bytes a row, bytes once), one launch each."""
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
    build = max(2 * V * K * E * C / flops, 4 * V * K * C / bandwidth)

    def gain(B):
        return floor(device, B, *direct) - floor(device, B, *folded) - build

    seen = [make_plan(net, device, [], Job(batch=batch), whole=False) for batch in (1, 1000, 10**7)]
    if gain(10**12) <= 0:
        assert all("a row would be no cheaper" in plan.fold and not tables(plan) for plan in seen)
        return
    numbers = {pays_from(plan) for plan in seen}
    assert len(numbers) == 1, "the break-even does not depend on the job"
    (first,) = numbers
    assert gain(first) > 0
    assert first == 1 or gain(first - 1) <= 0
    for plan in seen:
        assert bool(tables(plan)) == (plan.job.batch >= first)
    assert tables(make_plan(net, device, [], Job(batch=first), whole=False))
    assert first == 1 or not tables(make_plan(net, device, [], Job(batch=first - 1), whole=False))


def test_what_is_built_either_way_is_not_the_folds():
    """The norm's numbers are folded into the convolution with and without tables."""
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
    assert direct.fold == "not folded: no kernel of two cores takes layer 'conv3' (TokenConv)"
    folded = make_plan(net, CPU, [TakeBut(Conv1d)], Job(batch=1))
    assert folded.fold == "folded: no kernel of two cores takes layer 'conv3' (Conv1d)"
    assert len(tables(folded)) == 4
    with pytest.raises(PlanError, match="takes layer 'relu3'"):
        make_plan(net, CPU, [TakeBut(ReLU)])
