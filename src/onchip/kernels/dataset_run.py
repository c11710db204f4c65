"""Finding the layers of a data set in a training step: those that begin it and those that end it.

Each is a run of nodes that one launch computes, on any device.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

from onchip.network.graph import Network, Node
from onchip.network.layers import Counted, DataRows, Logged, RowIds, StepRow
from onchip.network.recipe import Recipe, as_is
from onchip.network.types import DTYPE_BYTES
from onchip.plan.kernel import Claim, Cost
from onchip.plan.plan import values_written

IDS, ROWS, ROW = range(3)  # as gradient/step_rows.cu has them


@dataclass(frozen=True)
class ReadArray:
    """An array that a step reads at its beginning: the ids themselves, rows of the data by id, or a row of a table."""

    kind: int
    output: int
    data: str = ""  # the claim's recipe; "" for ids
    rows: int = 0  # of the data
    row_bytes: int = 8


@dataclass(frozen=True)
class StepRows:
    """What a step reads at its beginning."""

    arrays: tuple[ReadArray, ...]
    ids: int  # in the order; 0: there is none


@dataclass(frozen=True)
class LoggedNumber:
    """A log with one number per step."""

    value: int  # input
    log: str  # the claim's recipe
    output: int
    steps: int
    number_bytes: int


@dataclass(frozen=True)
class CountedState:
    counters: str  # the claim's recipe
    output: int
    per_step: tuple[int, ...]
    per_row: tuple[int, ...]


@dataclass(frozen=True)
class StepCounters:
    """What a step leaves for the next one."""

    inputs: int  # of the claim
    logs: tuple[LoggedNumber, ...]
    counters: tuple[CountedState, ...]


def claim_rows(kernel: str, net: Network, start: int) -> Claim | None:
    """RowIds or StepRow at net.nodes[start], with the rows and the tables' rows that follow: facts are StepRows."""
    first = net.nodes[start]
    if not isinstance(first.layer, RowIds | StepRow):
        return None

    def belongs(node: Node) -> bool:
        is_rows = isinstance(node.layer, DataRows) and isinstance(first.layer, RowIds) and node.inputs == (first.name,)
        at_step = isinstance(node.layer, StepRow) and node.weights["position"] == first.weights["position"]
        return is_rows or at_step

    nodes = [first, *itertools.takewhile(belongs, net.nodes_from(start + 1))]
    written = values_written(net, [node.name for node in nodes])
    recipes = {role: _recipe(net, first.weights[role]) for role in ("order", "position") if role in first.weights}
    arrays, row_bytes, fixed_bytes = list[ReadArray](), 8, 0
    for i, node in enumerate(nodes):
        if node.name not in written:
            continue
        output, nbytes = written.index(node.name), net.types[node.name].row_bytes
        if isinstance(node.layer, RowIds):
            arrays.append(ReadArray(IDS, output))
            continue
        of_batch = isinstance(node.layer, DataRows)
        weight = node.weights["data" if of_batch else "table"]
        recipes[f"data{i}"] = _recipe(net, weight)
        kind, rows = ROWS if of_batch else ROW, int(net.weights[weight].shape[0])
        arrays.append(ReadArray(kind, output, f"data{i}", rows, nbytes))
        row_bytes, fixed_bytes = row_bytes + 2 * nbytes * of_batch, fixed_bytes + 2 * nbytes * (not of_batch)
    facts = StepRows(tuple(arrays), recipes["order"].shape[0] if "order" in recipes else 0)
    return _claim(kernel, nodes, Cost(0, row_bytes, fixed_bytes), "the rows of a step, by id", recipes, facts)


def claim_counters(kernel: str, net: Network, start: int) -> Claim | None:
    """Counted at net.nodes[start], and what is counted and logged after it: facts are StepCounters."""
    nodes = list(itertools.takewhile(lambda node: isinstance(node.layer, Counted | Logged), net.nodes_from(start)))
    if not nodes or not isinstance(nodes[0].layer, Counted):  # the first input has the batch's rows
        return None
    positions = {node.weights["position"] for node in nodes if isinstance(node.layer, Logged)}
    if len(positions) > 1:
        return None
    recipes = dict(zip(("position",), (_recipe(net, name) for name in positions), strict=False))
    inputs = list(dict.fromkeys(value for node in nodes for value in node.inputs))
    written = values_written(net, [node.name for node in nodes])
    logs, counters = list[LoggedNumber](), list[CountedState]()
    for i, node in enumerate(nodes):
        role, layer = f"state{i}", node.layer
        if node.name not in written:
            continue
        output = written.index(node.name)
        if isinstance(layer, Counted):
            counters.append(CountedState(role, output, layer.per_step, layer.per_row))
            recipes[role] = _recipe(net, node.weights["counters"])
        else:
            recipes[role] = _recipe(net, node.weights["log"])
            steps, nbytes = recipes[role].shape[0], DTYPE_BYTES[recipes[role].dtype]
            logs.append(LoggedNumber(inputs.index(node.inputs[0]), role, output, steps, nbytes))
    facts, cost = StepCounters(len(inputs), tuple(logs), tuple(counters)), Cost(0, 0, 64)
    return _claim(kernel, nodes, cost, "counters and log, in place", recipes, facts, updates_in_place=True)


def _claim(
    kernel: str, nodes: list[Node], cost: Cost, why: str, recipes: Mapping[str, Recipe], facts: object,
    updates_in_place: bool = False,
) -> Claim:  # fmt: skip
    kinds = ",".join(dict.fromkeys(node.layer.kind for node in nodes))
    names = tuple(node.name for node in nodes)
    return Claim(
        kernel, f"{kernel}<{kinds}>", names, cost, why, recipes, facts=facts, updates_in_place=updates_in_place
    )


def _recipe(net: Network, name: str) -> Recipe:
    return Recipe.of(as_is, (name,), net.weights[name].shape, net.weight_type(name).dtype)
