"""update: the optimiser's layers of all parameters in one launch, in place on the state.

Idea    A training step ends with a few elementwise layers per parameter: clipping, decay, moments, the new weight. One
        pass over the gradient, the weight and its moments computes all of them. A task is a chunk of one parameter.
Floor   Memory: 12 B per weight for SGD, 20 B with momentum, 28 B for Adam.
State   The new value of a state may be stored in the state's own array; any other array receives a copy first.
Limits  float32; the layers of a parameter as plan/gradient/step.py writes them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from onchip.kernels.cpu.compiler.jit import address, address_of, compiled, floats_at, int_at, ints_at, linked
from onchip.kernels.cpu.compiler.late_numba import types
from onchip.kernels.cpu.cost import CoreCost
from onchip.kernels.cpu.kernel import CpuKernel
from onchip.kernels.cpu.threading.launches import CompiledLaunch, words
from onchip.kernels.cpu.threading.threads import run_tasks
from onchip.network.graph import Network, Node
from onchip.network.layers import (
    AdamStep,
    Decayed,
    Descent,
    FirstMoment,
    Layer,
    Mul,
    RunningAverage,
    SecondMoment,
    Velocity,
)
from onchip.network.layers.optimiser import BETA1, BETA2, DECAY, EPS, FIRST, LR, MOMENTUM, SECOND, STEP_VALUES, Update
from onchip.network.recipe import Array, Recipe, as_is
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Job, Refusal

_CHUNK = 1 << 13  # elements per task
_THREAD_CHUNKS = 2  # per thread: below this, a thread is not woken
_DESCENT, _MOMENTUM, _ADAM, _AVERAGE = range(4)
_ZERO, _ONE, _EPS = np.float32(0), np.float32(1), np.float32(EPS)
_BETA1, _REST1, _BETA2, _REST2 = (np.float32(value) for value in (BETA1, 1 - BETA1, BETA2, 1 - BETA2))

# A parameter in the table that `_run` reads: its kind, size and first task; the operand that is its gradient; addresses
# of the clip scale and the step's values, or 0; whether its gradient or, for AdamW, the weight decays; the share of a
# running average, as bits. Then the weight, first and second moment: address of the state, operand that is the new one.
(
    _KIND, _SIZE, _BEGIN, _GRADIENT, _SCALE, _VALUES, _DECAYS, _IS_DECOUPLED, _SHARE, _WEIGHT, _MEAN, _SQUARE,
) = (*range(10), 11, 13)  # fmt: skip
_COLUMNS = 15


@compiled(inline=True)
def _state(row: Array, state: int, operands: int, first: int, count: int) -> int:
    """The address of the elements of a new state, with the old values."""
    old, new = row[state] + first * 4, int_at(operands + row[state + 1] * 8) + first * 4
    if new != old:
        x, y = floats_at(old, count), floats_at(new, count)
        for i in range(count):
            y[i] = x[i]
    return new  # type: ignore[no-any-return]


@compiled()
def _update(worker: int, task: int, table: Array, operands: int) -> None:
    at = 0
    while at + _COLUMNS < len(table) and table[at + _COLUMNS + _BEGIN] <= task:
        at += _COLUMNS
    row = table[at : at + _COLUMNS]
    first = (task - row[_BEGIN]) * _CHUNK
    count = min(_CHUNK, row[_SIZE] - first)
    kind = row[_KIND]
    g = floats_at(int_at(operands + row[_GRADIENT] * 8) + first * 4, count)
    w = floats_at(_state(row, _WEIGHT, operands, first, count), count)
    if kind == _AVERAGE:
        share = np.int32(row[_SHARE]).view(np.float32)
        for i in range(count):
            w[i] = w[i] + share * (g[i] - w[i])
        return
    values = floats_at(row[_VALUES], len(STEP_VALUES))
    scale = floats_at(row[_SCALE], 1)[0] if row[_SCALE] else _ONE
    decay, lr = values[DECAY] if row[_DECAYS] else _ZERO, values[LR]
    if kind == _DESCENT:
        for i in range(count):
            w[i] = w[i] - lr * (scale * g[i] + decay * w[i])
        return
    v = floats_at(_state(row, _MEAN, operands, first, count), count)
    if kind == _MOMENTUM:
        momentum = values[MOMENTUM]
        for i in range(count):
            v[i] = momentum * v[i] + (scale * g[i] + decay * w[i])
            w[i] = w[i] - lr * v[i]
        return
    s = floats_at(_state(row, _SQUARE, operands, first, count), count)
    keep = _ONE - lr * values[DECAY] if row[_IS_DECOUPLED] else _ONE
    rate, root = lr / values[FIRST], _ONE / values[SECOND]
    for i in range(count):
        gradient = scale * g[i] + decay * w[i]
        v[i] = _BETA1 * v[i] + _REST1 * gradient
        s[i] = _BETA2 * s[i] + _REST2 * gradient * gradient
        w[i] = keep * w[i] - rate * v[i] / (np.sqrt(root * s[i]) + _EPS)


# Fields of the facts.
_TABLE, _LENGTH, _TASKS, _FIELDS = range(4)


@linked(*(types.int64,) * 4)
def _run(facts: int, operands: int, B: int, threads: int) -> None:
    """Entry point of a CompiledLaunch."""
    fields = ints_at(facts, _FIELDS)
    tasks = fields[_TASKS]
    arguments = (ints_at(fields[_TABLE], fields[_LENGTH]), operands)
    run_tasks(_update, arguments, tasks, max(1, min(threads, tasks // _THREAD_CHUNKS)))


@dataclass(frozen=True)
class Parameter:
    """A weight and how it is updated, by the names of the network; "" where there is none."""

    kind: int
    gradient: str
    states: tuple[tuple[str, str], ...]  # the weight, then its moments; each with the value that replaces it
    values: str = ""
    scale: str = ""
    decays: bool = False
    is_decoupled: bool = False
    share: float = 0.0


@dataclass(frozen=True)
class Facts:
    parameters: tuple[Parameter, ...]
    operands: tuple[str, ...]  # gradients, then new states
    recipes: tuple[tuple[str, str], ...]  # a weight of the network, and its recipe in the claim


class UpdateKernel(CpuKernel):
    name = "update"
    layers = (Update, Mul)

    def applies(self, net: Network, start: int) -> bool:
        return _belongs(net, net.nodes[start]) and not (start and _belongs(net, net.nodes[start - 1]))

    def offers(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim | Refusal]:
        nodes = list(itertools.takewhile(lambda node: _belongs(net, node), net.nodes_from(start)))
        parameters = _parameters(net, nodes)
        weights = dict.fromkeys(name for node in nodes for name in node.weights.values())
        if isinstance(parameters, str) or any(net.weight_type(name).dtype != "float32" for name in weights):
            why = parameters if isinstance(parameters, str) else "computes on float32"
            yield Refusal(self.name, nodes[0].name, why)
            return
        recipes = {f"w{i}": Recipe.of(as_is, (name,), net.weights[name].shape) for i, name in enumerate(weights)}
        new = [value for each in parameters for _, value in each.states]
        gradients = list(dict.fromkeys(each.gradient for each in parameters))
        moved = sum(net.types[value].row_bytes for value in gradients) + sum(2 * net.types[v].row_bytes for v in new)
        kinds = ",".join(dict.fromkeys(node.layer.kind for node in nodes if not isinstance(node.layer, Mul)))
        inside = tuple(node.name for node in nodes)
        inputs = dict.fromkeys(value for node in nodes for value in node.inputs if value not in inside)
        operands = (*inputs, *(name for name in inside if name in new))
        yield Claim(
            self.name, f"{self.name}<{kinds}>", inside, CoreCost(sum(map(net.row_flop, nodes)), moved),
            why="one pass over each parameter, in place", recipes=recipes,
            facts=Facts(tuple(parameters), operands, tuple(zip(weights, recipes, strict=True))), updates_in_place=True,
        )  # fmt: skip

    def bind(self, claim: Claim, weights: dict[str, Array]) -> CompiledLaunch:
        meta = claim.facts
        assert isinstance(meta, Facts)
        arrays = {name: np.ascontiguousarray(weights[recipe]) for name, recipe in meta.recipes}
        at = {name: i for i, name in enumerate(meta.operands)}
        rows, tasks = [], 0
        for each in meta.parameters:
            states = [field for old, new in each.states for field in (arrays[old], at[new])]
            size, share = arrays[each.states[0][0]].size, int(np.float32(each.share).view(np.int32))
            row = words(
                each.kind, size, tasks, at[each.gradient], arrays.get(each.scale, 0), arrays.get(each.values, 0),
                each.decays, each.is_decoupled, share, *states, *(0,) * (_COLUMNS - _WEIGHT - len(states)),
            )  # fmt: skip
            rows.append(row)
            tasks += -(-size // _CHUNK)
        table = np.concatenate(rows)
        fields = words(table, len(table), tasks)
        return CompiledLaunch(address_of(_run), lambda threads: (address(fields), (fields, table, arrays)))


def _belongs(net: Network, node: Node) -> bool:
    """An update, or the clipping of its gradient."""
    if not isinstance(node.layer, Mul):
        return isinstance(node.layer, Update)
    is_scaled = len(node.inputs) == 1 and net.weight_type(node.weights["constant"]).shape == ()
    readers = net.readers(node.name)
    return is_scaled and bool(readers) and all(isinstance(reader.layer, Update) for reader in readers)


def _parameters(net: Network, nodes: Sequence[Node]) -> list[Parameter] | str:
    """The parameters that these nodes update; or why the kernel cannot."""
    made = {node.name: node for node in nodes}
    found, used = list[Parameter](), set[str]()
    for node in nodes:
        if isinstance(node.layer, Descent | AdamStep | RunningAverage):
            parameter, chain = _parameter(made, node)
            if parameter.gradient in made:
                return f"no optimiser has the layers before '{node.name}'"
            found.append(parameter)
            used.update(chain)
    new = {value for each in found for _, value in each.states}
    is_read = any(reader.name not in made for node in nodes for reader in net.readers(node.name))
    if is_read or used != made.keys() or made.keys() & net.kept != new:
        return "other layers read what it computes, or it is not the new value of a state"
    return found


def _parameter(made: Mapping[str, Node], last: Node) -> tuple[Parameter, list[str]]:
    """What these nodes update, and their names, from the one that computes the new weight; made: all of the launch."""
    used = [last.name]

    def before(value: str, kind: type[Layer], **weights: str) -> Node | None:
        """The node that computes a value, if it is of this kind and has these weights."""
        node = made.get(value)
        if node is None or not isinstance(node.layer, kind) or not weights.items() <= node.weights.items():
            return None
        used.append(value)
        return node

    (g, *others), layer = last.inputs, last.layer
    if isinstance(layer, RunningAverage):
        return Parameter(_AVERAGE, g, ((last.weights["average"], last.name),), share=layer.momentum), used
    kind, weight, values = _DESCENT, last.weights["weight"], last.weights["values"]
    moments: list[tuple[str, str]] = []
    if isinstance(layer, AdamStep):
        first, second = before(g, FirstMoment), before(others[0], SecondMoment)
        if first is not None and second is not None and first.inputs == second.inputs:
            kind, (g,) = _ADAM, first.inputs
            moments = [(first.weights["moment"], first.name), (second.weights["moment"], second.name)]
    elif (velocity := before(g, Velocity, values=values)) is not None:
        kind, (g,), moments = _MOMENTUM, velocity.inputs, [(velocity.weights["velocity"], velocity.name)]
    decayed = before(g, Decayed, weight=weight, values=values)
    g = g if decayed is None else decayed.inputs[0]
    clipped = before(g, Mul)
    g, scale = (g, "") if clipped is None else (clipped.inputs[0], clipped.weights["constant"])
    is_decoupled = isinstance(layer, AdamStep) and layer.is_decoupled
    states = ((weight, last.name), *moments)
    return Parameter(kind, g, states, values, scale, decayed is not None, is_decoupled), used
