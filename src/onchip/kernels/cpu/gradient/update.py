"""update: the optimiser's layers of all parameters in one launch, in place on the state.

Idea    A training step ends with a few elementwise layers per parameter: clipping, decay, moments, the new weight. One
        pass over the gradient, the weight and its moments computes all of them. A task is a chunk of one parameter.
Floor   Memory: 12 B per weight for SGD, 20 B with momentum, 28 B for Adam; 8 B more with an average of the weights.
State   The new value of a state may be stored in the state's own array; any other array receives a copy first.
Limits  float32; the layers of a parameter as plan/gradient/step.py writes them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from onchip.kernels.cpu.compiler.jit import address, address_of, compiled, floats_at, int_at, ints_at, linked
from onchip.kernels.cpu.compiler.late_numba import types
from onchip.kernels.cpu.cost import CoreCost
from onchip.kernels.cpu.kernel import CpuKernel
from onchip.kernels.cpu.threading.launches import CompiledLaunch, words
from onchip.kernels.cpu.threading.threads import run_tasks
from onchip.kernels.optimiser_run import (
    ADAMW,
    AVERAGE,
    DESCENT,
    MOMENTUM,
    NESTEROV,
    ParameterUpdate,
    begins_updates,
    find_updates,
)
from onchip.network.graph import Network
from onchip.network.layers import Mul, optimiser
from onchip.network.layers.optimiser import BETA2, DECAY, EPS, FIRST, LR, SECOND, STEP_VALUES, Update
from onchip.network.recipe import Array, Recipe, as_is
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Job, Refusal

_CHUNK = 1 << 13  # elements per task
_THREAD_CHUNKS = 2  # per thread: below this, a thread is not woken
_ZERO, _ONE, _EPS = np.float32(0), np.float32(1), np.float32(EPS)
_BETA2, _REST2 = np.float32(BETA2), np.float32(1 - BETA2)

# A parameter in the table that `_run` reads: its kind, size and first task; the operand that is its gradient; addresses
# of the clip scale and the step's values, or 0; its factor of weight_decay and the rate of a running average, as bits.
# Then the weight, first and second moment, and the weight's average: address of the state, operand that is the new one.
# Then Adam's beta1 and 1 - beta1, as bits.
_KIND, _SIZE, _BEGIN, _GRADIENT, _SCALE, _VALUES, _FACTOR, _RATE = range(8)
_WEIGHT, _MEAN, _SQUARE, _MOVING = range(8, 16, 2)
_BETA1, _REST1 = 16, 17
_COLUMNS = 18


@compiled(inline=True)
def _state(row: Array, state: int, operands: int, first: int, count: int) -> int:
    """The address of the elements of a new state, with the old values."""
    old, new = row[state] + first * 4, int_at(operands + row[state + 1] * 8) + first * 4
    if new != old:
        x, y = floats_at(old, count), floats_at(new, count)
        for i in range(count):
            y[i] = x[i]
    return new  # type: ignore[no-any-return]


@compiled(inline=True)
def _follow(row: Array, average: Array, x: Array, count: int) -> None:
    rate = np.int32(row[_RATE]).view(np.float32)
    for i in range(count):
        average[i] = average[i] + rate * (x[i] - average[i])


@compiled(inline=True)
def _step(row: Array, operands: int, first: int, count: int, g: Array, w: Array) -> None:
    """A step of an optimiser: of the weight w with the gradient g."""
    kind, values = row[_KIND], floats_at(row[_VALUES], len(STEP_VALUES))
    scale = floats_at(row[_SCALE], 1)[0] if row[_SCALE] else _ONE
    decay, lr = np.int32(row[_FACTOR]).view(np.float32) * values[DECAY], values[LR]
    if kind == DESCENT:
        for i in range(count):
            w[i] = w[i] - lr * (scale * g[i] + decay * w[i])
        return
    v = floats_at(_state(row, _MEAN, operands, first, count), count)
    momentum = values[optimiser.MOMENTUM]
    if kind == MOMENTUM:
        for i in range(count):
            v[i] = momentum * v[i] + (scale * g[i] + decay * w[i])
            w[i] = w[i] - lr * v[i]
        return
    if kind == NESTEROV:
        for i in range(count):
            gradient = scale * g[i] + decay * w[i]
            v[i] = momentum * v[i] + gradient
            w[i] = w[i] - lr * (gradient + momentum * v[i])
        return
    s = floats_at(_state(row, _SQUARE, operands, first, count), count)
    keep = _ONE
    if kind == ADAMW:
        keep, decay = _ONE - lr * decay, _ZERO
    rate, root = lr / values[FIRST], _ONE / values[SECOND]
    beta1, rest1 = np.int32(row[_BETA1]).view(np.float32), np.int32(row[_REST1]).view(np.float32)
    for i in range(count):
        gradient = scale * g[i] + decay * w[i]
        v[i] = beta1 * v[i] + rest1 * gradient
        s[i] = _BETA2 * s[i] + _REST2 * gradient * gradient
        w[i] = keep * w[i] - rate * v[i] / (np.sqrt(root * s[i]) + _EPS)


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
    if kind == AVERAGE:
        _follow(row, w, g, count)
        return
    _step(row, operands, first, count, g, w)
    if row[_MOVING]:
        _follow(row, floats_at(_state(row, _MOVING, operands, first, count), count), w, count)


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
class Facts:
    parameters: tuple[ParameterUpdate, ...]
    operands: tuple[str, ...]  # gradients, then new states
    recipes: tuple[tuple[str, str], ...]  # a weight of the network, and its recipe in the claim


class UpdateKernel(CpuKernel):
    name = "update"
    layers = (Update, Mul)

    def applies(self, net: Network, start: int) -> bool:
        return begins_updates(net, start)

    def offers(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim | Refusal]:
        inside, parameters = find_updates(net, start)
        nodes = [net.by_name[name] for name in inside]
        weights = dict.fromkeys(name for node in nodes for name in node.weights.values())
        if isinstance(parameters, str) or any(net.weight_type(name).dtype != "float32" for name in weights):
            why = parameters if isinstance(parameters, str) else "computes on float32"
            yield Refusal(self.name, nodes[0].name, why)
            return
        recipes = {f"w{i}": Recipe.of(as_is, (name,), net.weights[name].shape) for i, name in enumerate(weights)}
        new = [value for each in parameters for _, value in each.replaced]
        gradients = list(dict.fromkeys(each.gradient for each in parameters))
        moved = sum(net.types[value].row_bytes for value in gradients) + sum(2 * net.types[v].row_bytes for v in new)
        kinds = ",".join(dict.fromkeys(node.layer.kind for node in nodes if not isinstance(node.layer, Mul)))
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
            average = [field for old, new in each.average for field in (arrays[old], at[new])] or [0, 0]
            size = arrays[each.states[0][0]].size
            numbers = each.decay, each.rate, each.beta1, 1 - each.beta1
            factor, rate, *betas = (int(np.float32(number).view(np.int32)) for number in numbers)
            row = words(
                each.kind, size, tasks, at[each.gradient], arrays.get(each.scale, 0), arrays.get(each.values, 0),
                factor, rate, *states, *(0,) * (_MOVING - _WEIGHT - len(states)), *average, *betas,
            )  # fmt: skip
            rows.append(row)
            tasks += -(-size // _CHUNK)
        table = np.concatenate(rows)
        fields = words(table, len(table), tasks)
        return CompiledLaunch(address_of(_run), lambda threads: (address(fields), (fields, table, arrays)))
