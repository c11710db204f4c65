"""All rewrites together on random networks; and the small ones: unused layers and identities."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from networks import YES_NO, Grow, assert_rewrites, assert_same_meaning, drawn, seeded, share_that_fires
from onchip.network.graph import Network, Node
from onchip.network.layers import (
    Add,
    AvgPool1d,
    BatchNorm1d,
    BatchNorm2d,
    Cast,
    Concat,
    Conv1d,
    Conv2d,
    ConvTranspose1d,
    ConvTranspose2d,
    Dropout,
    GlobalMax,
    GlobalMean,
    Identity,
    Linear,
    MaxPool2d,
    Mul,
    Permute,
    ReLU,
    Reshape,
    Sigmoid,
    Softmax,
    Sub,
    Tanh,
    Tile,
)
from onchip.network.recipe import Recipe
from onchip.network.types import TensorType
from onchip.plan.kernel import OPTIONAL_REWRITES
from onchip.plan.rewrites import REWRITES, drop_idle, drop_tiles, drop_unread, fold_embeddings, rewrite
from onchip.plan.rewrites.edit import Draft
from python_calls import python_calls
from takers import stored

# -- networks of every kind ------------------------------------------------------------------------------------


def anything(pick) -> Network:
    """Up to twelve steps, each reading an existing value; one or more outputs."""
    if pick((True, False, False)):
        grow = Grow(pick, pick(range(3, 6)), dtype=pick(("int32", "int64")))
        values = [grow.embedding("x", pick(range(2, 6)), pick((2, 3, 4)))]
        values.append(grow.add(Permute((0, 2, 1)), values[0]))
    else:
        grow = Grow(pick, *pick(((6,), (4, 5), (2, 4, 3))))
        values = ["x"]
    for _ in range(pick(range(2, 13))):
        values.append(_step(grow, pick((values[-1], values[-1], pick(values))), values))
    outputs = [values[-1], *(value for value in values[:-1] if pick((False,) * 5 + (True,)))]
    return grow.network(*outputs)


def _step(grow: Grow, value: str, values: list[str]) -> str:
    """One more layer, or a few that belong together, that read a value."""
    pick, row = grow.pick, grow.row(value)
    steps = [lambda: grow.add(pick((ReLU(), Tanh(), Identity(), Dropout(), Reshape(row), Concat(1))), value)]
    steps += [lambda: grow.add(pick((Add(), Mul())), value, pick([v for v in values if grow.row(v) == row]))]
    beside = [v for v in values if grow.row(v)[1:] == row[1:] and len(grow.row(v)) == len(row)]
    if np.prod(row) < 60:
        steps += [lambda: grow.add(Concat(1), value, pick(beside))]
    steps += [lambda: grow.norm(value)] * 2 if len(row) < 4 else []
    if len(row) == 1:
        steps += [lambda: grow.linear(value)] * 4 + [lambda: grow.add(Softmax(), value)]
        steps += [lambda: grow.add(Reshape((2, -1)), value)] if row[0] % 2 == 0 else []
    if len(row) == 2:
        steps += [lambda: grow.add(Permute((0, 2, 1)), value), lambda: grow.linear(value)]
        steps += [lambda: grow.add(pick((GlobalMax((2,)), GlobalMean((-1,), keep=True))), value)]
        steps += [lambda: grow.conv(value, Conv1d((1,), (pick((0, 1)), 0)), pick((1, 2)), 1)]
        steps += [lambda: _side_by_side(grow, value)]
        if np.prod(row) < 40:
            steps += [lambda: grow.transposed(value, ConvTranspose1d((2,), (0, 1)), pick((1, 2)), 3)]
        steps += [lambda: grow.add(AvgPool1d((2,), (1,)), value)] if row[1] > 1 else []
    if len(row) == 3:
        steps += [lambda: grow.add(Permute((0, *pick(list(itertools.permutations((1, 2, 3)))))), value)]
        steps += [lambda: grow.conv(value, Conv2d(pads=(0, 1, 0, 0)), 2, 1, 2)]
        steps += [lambda: grow.transposed(value, ConvTranspose2d((1, 2)), 2, 2, 2)] if np.prod(row) < 40 else []
        steps += [lambda: grow.add(MaxPool2d((1, 1), (2, 2)), value)]
    if len(row) > 1:
        steps += [lambda: grow.add(Reshape((-1,)), value)] * 2
    return pick(steps)()


def _side_by_side(grow: Grow, value: str) -> str:
    convs = [grow.conv(value, Conv1d((1,), (1, 1)), grow.pick((1, 2)), 3) for _ in range(grow.pick((2, 3)))]
    if grow.pick(YES_NO):
        convs = [grow.add(GlobalMax((2,)), grow.add(ReLU(), conv)) for conv in convs]
    return grow.add(Concat(1), *convs)


@settings(max_examples=200)
@given(data=st.data())
def test_all_rewrites_together_keep_the_meaning(data):
    net = anything(drawn(data))
    left = "tables", "last", "parallel"  # applied once, after all others; "last" undoes what absorb_permutes does
    changed, told = rewrite(net, left)
    assert not (changed is net and told)
    assert told or {node.name for node in changed.nodes} == {node.name for node in net.nodes}  # order is unreported
    assert_same_meaning(net, changed)
    assert rewrite(changed, left) == (changed, ())
    folded, told_too = rewrite(net)
    assert told_too[: len(told)] == told
    assert_same_meaning(net, folded)


def test_what_two_layers_read_folds_into_them_once_they_are_one():
    grow = Grow(seeded(1), 6)
    norm = grow.norm(grow.add(ReLU(), "x"))
    net = grow.network(grow.linear(norm, 2), grow.linear(norm, 3))
    changed, told = rewrite(net)
    assert BatchNorm1d not in [type(node.layer) for node in changed.nodes]
    assert [line.split()[0] for line in told] == ["merged", "folded"]
    assert_same_meaning(net, changed)
    assert rewrite(changed) == (changed, ())


@pytest.mark.parametrize("without", [c for n in range(4) for c in itertools.combinations(OPTIONAL_REWRITES, n)])
def test_any_of_them_may_be_left_out(without):
    fired = 0
    for seed in range(30):
        net = anything(seeded(seed))
        changed, told = rewrite(net, without)
        assert_same_meaning(net, changed)
        fired += len(told)
    assert fired > 20


LEFT = {
    "fold": (BatchNorm1d, BatchNorm2d),
    "merge": (Concat,),
    "windows": (Conv2d,),
    "phases": (ConvTranspose1d, ConvTranspose2d),
}


@pytest.mark.parametrize("name", OPTIONAL_REWRITES)
def test_what_is_left_out_does_not_happen(name):
    grow = Grow(seeded(1), 2, 4)
    value = grow.add(ReLU(), grow.norm(grow.transposed("x", ConvTranspose1d((2,)), 2, 2)))
    value = grow.add(Concat(1), *(grow.conv(value, Conv1d(), 2, 2) for _ in range(2)))
    grow.inputs["image"] = grow.types["image"] = TensorType(("B", 2, 3, 2), "float64")
    net = grow.network(value, grow.conv("image", Conv2d(), 4, 3, 2))
    if name == "early":
        made, left = ({node.name for node in rewrite(net, without)[0].nodes} for without in ((), (name,)))
        assert len(made) == len(left) + 1  # two activations before an Interleave instead of one after it
    else:
        assert not [node for node in rewrite(net)[0].nodes if isinstance(node.layer, LEFT[name])]
        assert [node for node in rewrite(net, (name,))[0].nodes if isinstance(node.layer, LEFT[name])]
    assert {n for n, _ in REWRITES if n} == set(OPTIONAL_REWRITES)


def test_rewrites_fire_on_most_of_these_networks():
    told = [rewrite(anything(seeded(seed)))[1] for seed in range(150)]
    assert sum(map(bool, told)) > 100
    words = {line.split()[0] for lines in told for line in lines}
    assert words == {"dropped", "folded", "absorbed", "replaced", "stored", "merged", "split"}


def test_one_makes_room_for_the_next():
    """After an absorbed Permute, a Reshape changes nothing; without it two Linears are adjacent."""
    grow = Grow(seeded(2), 3)
    turned = grow.add(Permute((0, 2, 1)), grow.add(Reshape((2, 3)), grow.linear("x", 6)))
    net = grow.network(grow.linear(grow.add(Reshape((-1,)), turned), 2))
    after, told = rewrite(net)
    assert [node.layer for node in after.nodes] == [Linear()]
    assert told == (
        "absorbed permute2 into linear0: permuted its weights",
        "dropped reshape3: it changes nothing",
        "merged linear0 into linear4: 3-6-2 becomes 3-2",
    )
    assert_same_meaning(net, after)


def test_a_network_with_nothing_to_do_is_returned_as_it_is():
    grow = Grow(seeded(3), 2, 5)
    value = grow.add(ReLU(), grow.conv("x", Conv1d(), 2, 3))
    net = grow.network(grow.linear(grow.add(Reshape((-1,)), value)))
    assert rewrite(net) == (net, ())
    for _, step in REWRITES:
        assert step(net) == (net, [])
    assert fold_embeddings(net) == (net, [])


# -- unused layers, and identities -----------------------------------------------------------------------------


def idle_layers(pick):
    """Layers that change nothing between others that do, as outputs, on the input, several in a row."""
    row = pick(((4,), (3, 3)))
    grow = Grow(pick, *row)
    values, idle = ["x"], []
    for _ in range(pick(range(1, 7))):
        source = pick((values[-1], values[-1], pick(values)))
        kind = pick(("relu", "turn", "idle", "idle", "two"))
        if kind == "idle":
            layer = pick(
                (
                    Identity(),
                    Dropout(0.3),
                    Reshape(row),
                    Reshape((-1, *row[1:])),
                    Concat(1),
                    Permute(range(1 + len(row))),
                )
            )
            idle.append(grow.add(layer, source))
            values.append(idle[-1])
        elif kind == "two":
            values.append(grow.add(Add(), source, pick(values)))
        else:
            layer = Permute((0, 2, 1)) if kind == "turn" and len(row) == 2 else ReLU()
            values.append(grow.add(layer, source))
    outputs = [values[-1], *(value for value in values if pick((False, False, True)))]
    net = grow.network(*outputs)
    # One that is an output stays only if it equals an input or another output.
    roots = {name: name for name in values}
    for name in idle:
        (source,) = next(node.inputs for node in grow.nodes if node.name == name)
        roots[name] = roots[source]
    stay, held = 0, {"x": True} | {roots[v]: True for v in outputs if v not in idle}
    for name in idle:
        if name in outputs:
            stay += held.get(roots[name], False)
            held[roots[name]] = True
    return net, len(idle) > stay


@settings(max_examples=150)
@given(data=st.data())
def test_what_changes_nothing_goes(data):
    assert_rewrites(drop_idle, idle_layers, drawn(data))


def dead_ends(pick):
    grow = Grow(pick, 3)
    values = ["x"]
    for _ in range(pick(range(1, 8))):
        values.append(grow.linear(pick(values), 3) if pick(YES_NO) else grow.add(Add(), pick(values), pick(values)))
    outputs = [value for value in values if pick((False, True))] or ["x"]
    needed, makers = set(outputs), {node.name: node for node in grow.nodes}
    for _ in values:
        needed |= {v for name in needed if name in makers for v in makers[name].inputs}
    return grow.network(*outputs), bool(set(makers) - needed)


@settings(max_examples=100)
@given(data=st.data())
def test_what_nobody_reads_goes(data):
    _, after = assert_rewrites(drop_unread, dead_ends, drawn(data))
    read = {value for node in after.nodes for value in node.inputs} | set(after.outputs)
    assert {node.name for node in after.nodes} <= read


def stretches(pick):
    """Tiles before Add and Mul; a Tile of a size above 1 has an effect."""
    grow = Grow(pick, 3, 4)
    narrow, repeats = pick((((2,), (1, 4)), ((1,), (3, 1)), ((1, 2), (3, 4)), ((), (1, 1))))
    value = grow.add(GlobalMean(narrow, keep=True), "x") if narrow else "x"
    tiled = grow.add(Tile(repeats if narrow and pick((True, True, True, False)) else (1, 2)), value)
    others = [v for v in ("x", "x", value, tiled) if np.prod(grow.row(v)) == 1 or grow.row(v) == grow.row(tiled)]
    fires = False
    for other in [pick(others) for _ in range(3)] if others else ():
        grow.add(pick((Add(), Mul(), Sub())), *pick(((tiled, other), (other, tiled))))
        is_wide = other == "x" and grow.row("x") == grow.row(tiled)  # else nobody is, and the Tile makes it so
        fires |= is_wide and all(n == 1 or k == 1 for n, k in zip(grow.row(value), repeats, strict=True))
    return grow.network(*(node.name for node in grow.nodes)), bool(fires and narrow)


@settings(max_examples=100)
@given(data=st.data())
def test_sizes_of_1_stretch_where_they_are_read(data):
    assert_rewrites(drop_tiles, stretches, drawn(data))


@pytest.mark.parametrize("family", [idle_layers, dead_ends, stretches])
def test_the_property_is_not_an_empty_one(family):
    assert 0.5 < share_that_fires(family) < 0.95


def test_what_dropping_says():
    nodes = (Node("a", ReLU(), ("x",)), Node("dead", Sigmoid(), ("a",)), Node("deader", ReLU(), ("dead",)))
    net, told = drop_unread(Network({"x": TensorType(("B", 2))}, nodes, ("a",), {}))
    assert [node.name for node in net.nodes] == ["a"]
    assert told == ["dropped dead: unused", "dropped deader: unused"]


@pytest.mark.parametrize("layer", [Identity(), Dropout(), Reshape((2,)), Permute((0, 1)), Concat(1), Cast("float64")])
def test_an_output_gives_its_name_to_what_stood_before_it(layer):
    nodes = (Node("a", ReLU(), ("x",)), Node("y", layer, ("a",)), Node("z", Sigmoid(), ("a",)))
    net = Network({"x": TensorType(("B", 2), "float64")}, nodes, ("z", "y"), {})
    after, told = drop_idle(net)
    assert told == ["dropped y: it changes nothing"]
    assert [(node.name, node.inputs) for node in after.nodes] == [("y", ("x",)), ("z", ("y",))]
    assert_same_meaning(net, after)


def test_a_cast_that_rounds_stays_and_nothing_is_merged_across_it():
    grow = Grow(seeded(0), 4)
    wide = grow.linear(grow.add(Cast("float64"), grow.add(Cast("float16"), grow.linear("x", 5))), 3)
    net = grow.network(wide)
    after, told = rewrite(net)
    assert told == ()
    assert after is net
    # Without the Casts the two Linears are one.
    (first, *_, last) = net.nodes
    bare = net.replace(nodes=(first, Node(last.name, last.layer, (first.name,), last.weights)))
    assert len(rewrite(bare)[0].nodes) == 1


@pytest.mark.parametrize("outputs", [("y",), ("a", "b"), ("b", "a", "x")])
def test_an_output_that_none_can_take_over_stays(outputs):
    source = "x" if outputs == ("y",) else "a"
    nodes = (Node("a", ReLU(), ("x",)), Node("b", Identity(), ("a",)), Node("y", Identity(), (source,)))
    net = Network({"x": TensorType(("B", 2), "float64")}, nodes, outputs, {})
    after, _ = drop_idle(drop_unread(net)[0])
    assert set(outputs) - {"x"} == {node.name for node in after.nodes}
    assert_same_meaning(net, after)


def test_a_draft_may_be_changed_in_any_order():
    nodes = (Node("r", ReLU(), ("x",)), Node("a", Identity(), ("r",)), Node("b", Identity(), ("a",)))
    net = Network({"x": TensorType(("B", 2), "float64")}, (*nodes, Node("c", Tanh(), ("a",))), ("b", "c"), {})
    draft = Draft(net)
    assert draft.bypass("b")  # a takes its name,
    assert draft.bypass("a")  # and r takes it from a
    draft.put(Node("new", Sigmoid(), ("r",)), Node("c", Add(), ("r", "new")))
    draft.put(Node("c", Mul(), ("new", "r")))
    after, _ = draft.done(["changed"])
    assert [(n.name, n.layer, n.inputs) for n in after.nodes] == [
        ("b", ReLU(), ("x",)),
        ("new", Sigmoid(), ("b",)),
        ("c", Mul(), ("new", "b")),
    ]


# -- large ones ------------------------------------------------------------------------------------------------


CHAINS = {
    "linears": lambda grow, value, i: grow.linear(value, 8),
    "norms": lambda grow, value, i: grow.norm(value) if i else grow.linear(value, 8),
    "idle": lambda grow, value, i: grow.add(Identity() if i else ReLU(), value),
    "convs": lambda grow, value, i: grow.transposed(value, ConvTranspose1d((1,), (1, 1)), 2, 3),
    "mixed": lambda grow, value, i: (
        grow.linear(value, 8) if i % 5 in (0, 3)
        else grow.norm(value) if i % 5 == 1
        else grow.add(Dropout() if i % 5 == 2 else ReLU(), value)
    ),
}  # fmt: skip


def chain(kind: str, count: int) -> Network:
    grow, value = Grow(seeded(0), *((2, 5) if kind == "convs" else (8,))), "x"
    for i in range(count):
        value = CHAINS[kind](grow, value, i)
    return grow.network(value)


@pytest.mark.parametrize("kind", CHAINS)
def test_the_work_goes_with_the_number_of_layers(kind):
    few, many = chain(kind, 75), chain(kind, 300)
    assert len(rewrite(many)[1]) >= 180
    assert python_calls(lambda: rewrite(many)) < 5 * python_calls(lambda: rewrite(few))


@pytest.mark.parametrize("kind", CHAINS)
def test_and_keep_their_meaning(kind):
    net = chain(kind, 30)
    assert_same_meaning(net, rewrite(net)[0])


def test_rewriting_computes_no_weight():
    net = chain("mixed", 20)
    weights = {name: stored(*w.shape, dtype="float64", flop=1) for name, w in net.weights.items()}
    after, told = rewrite(net.replace(weights=weights))
    assert told == rewrite(net)[1]
    assert all(isinstance(after.weights[name], Recipe) for node in after.nodes for name in node.weights.values())


def test_float32_weights_are_rounded_to_float32():
    for seed in range(30):
        net = anything(seeded(seed))
        narrow = net.replace(weights={name: np.asarray(w, np.float32) for name, w in net.weights.items()})
        after = fold_embeddings(rewrite(narrow)[0])[0]
        assert {after.weight_type(name).dtype for node in after.nodes for name in node.weights.values()} <= {"float32"}
        assert_same_meaning(narrow, after, tolerance=1e-5)
