"""The optimiser's update of all parameters in one launch: host side of gradient/update.cu."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from ctypes import c_double, c_int64, c_uint8, c_uint32, c_void_p
from dataclasses import dataclass
from pathlib import Path

from onchip.kernels.cuda.common.arguments import NOTHING, Input, Output, Struct, UInt32, Weight
from onchip.kernels.cuda.common.c_struct import CStruct
from onchip.kernels.cuda.common.kernel import CudaKernel, instance
from onchip.kernels.cuda.common.program import Budget, KernelLaunch, Program, Steps, grid_1d
from onchip.kernels.cuda.gradient.batch_sum import accumulated
from onchip.kernels.optimiser_run import ADAM, ParameterUpdate, begins_updates, find_updates
from onchip.network.graph import Network
from onchip.network.layers import Mul
from onchip.network.layers.optimiser import Update
from onchip.network.recipe import Recipe, as_is
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Cost, Job, Refusal

SOURCE = Path(__file__).with_suffix(".cu")
BLOCK_ELEMENTS, MAX_PARAMETERS = 1024, 36
DTYPES = {"float32": 0, "float16": 1, "bfloat16": 2, "float64": 3}


class ParameterStruct(CStruct):
    source, c_name = SOURCE, "Parameter"
    _fields_ = (
        ("gradient", c_void_p), ("weight", c_void_p), ("new_weight", c_void_p), ("first", c_void_p),
        ("new_first", c_void_p), ("second", c_void_p), ("new_second", c_void_p), ("average", c_void_p),
        ("new_average", c_void_p), ("scale", c_void_p), ("count", c_int64), ("decay", c_double), ("rate", c_double),
        ("beta1", c_double),
        ("first_block", c_uint32), ("kind", c_uint8), ("dtype", c_uint8), ("gradient_dtype", c_uint8),
        ("unused", c_uint8),
    )  # fmt: skip


class ParametersStruct(CStruct):
    source, c_name = SOURCE, "Parameters"
    _fields_ = (("parameter", ParameterStruct * MAX_PARAMETERS),)


@dataclass(frozen=True)
class ParameterArrays:
    """What a parameter's update reads and writes: the indices of inputs and outputs, the names of recipes."""

    kind: int
    dtype: str
    gradient_dtype: str
    count: int
    gradient: int
    states: tuple[tuple[str, int], ...]  # old and new
    scale: str
    decay: float
    rate: float
    average: tuple[tuple[str, int], ...] = ()
    beta1: float = 0.0

    @property
    def blocks(self) -> int:
        return -(-self.count // BLOCK_ELEMENTS)

    def struct(self, first_block: int) -> Struct:
        arrays = [(Weight(old), Output(new)) for old, new in self.states]
        (weight, new_weight), (first, new_first), (second, new_second) = (*arrays, *((NOTHING, NOTHING),) * 2)[:3]
        average, new_average = next(((Weight(old), Output(new)) for old, new in self.average), (NOTHING, NOTHING))
        return ParameterStruct.of(
            gradient=Input(self.gradient), weight=weight, new_weight=new_weight, first=first, new_first=new_first,
            second=second, new_second=new_second, average=average, new_average=new_average,
            scale=Weight(self.scale) if self.scale else NOTHING, count=self.count, decay=self.decay, rate=self.rate,
            beta1=self.beta1, first_block=first_block, kind=self.kind, dtype=DTYPES[self.dtype],
            gradient_dtype=DTYPES[self.gradient_dtype], unused=0,
        )  # fmt: skip


@dataclass(frozen=True)
class UpdateLowering:
    parameters: tuple[ParameterArrays, ...]
    values: str  # "": running averages alone

    def at(self, B: int) -> Steps:
        starts = range(0, len(self.parameters), MAX_PARAMETERS)
        return Steps(tuple(self._launch(self.parameters[i : i + MAX_PARAMETERS]) for i in starts))

    def _launch(self, parameters: Sequence[ParameterArrays]) -> KernelLaunch:
        first_blocks = [0, *itertools.accumulate(parameter.blocks for parameter in parameters)]
        structs = [each.struct(at) for each, at in zip(parameters, first_blocks, strict=False)]
        values = Weight(self.values) if self.values else NOTHING
        arguments = ParametersStruct.of(parameter=structs), UInt32(len(parameters)), values
        return KernelLaunch(Program(SOURCE, "update"), grid_1d(first_blocks[-1]), arguments, Budget(64), after=())


class UpdateKernel(CudaKernel):
    name = "update"
    layers = (Update, Mul)
    dtypes = tuple(DTYPES)

    def applies(self, net: Network, start: int) -> bool:
        return begins_updates(net, start)

    def offers(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim | Refusal]:
        names, updates = find_updates(net, start)
        if isinstance(updates, str):
            yield Refusal(self.name, names[0], updates)
            return
        nodes = [net.by_name[name] for name in names]
        if why := next(filter(None, (_why_not(net, update) for update in updates)), ""):
            yield Refusal(self.name, names[0], why)
            return
        weights = [name for node in nodes for role, name in node.weights.items() if role != "values"]
        values = {each.values for each in updates if each.values}
        used = dict.fromkeys([*weights, *values])
        recipes = {
            f"w{i}": Recipe.of(as_is, (name,), net.weights[name].shape, net.weight_type(name).dtype)
            for i, name in enumerate(used)
        }
        at = dict(zip(used, recipes, strict=True))
        inputs = list(dict.fromkeys(value for node in nodes for value in node.inputs if value not in set(names)))
        outputs = [name for name in names if name in net.kept]

        def arrays(update: ParameterUpdate) -> ParameterArrays:
            states, average = (
                tuple((at[old], outputs.index(new)) for old, new in of) for of in (update.states, update.average)
            )
            count, scale = math.prod(net.weights[update.states[0][0]].shape), at[update.scale] if update.scale else ""
            return ParameterArrays(
                update.kind,
                net.weight_type(update.states[0][0]).dtype,
                net.types[update.gradient].dtype,
                count,
                inputs.index(update.gradient),
                states,
                scale,
                update.decay,
                update.rate,
                average,
                update.beta1,
            )

        moved = sum(net.types[value].row_bytes for value in inputs) + sum(2 * net.types[v].row_bytes for v in outputs)
        lowering = UpdateLowering(tuple(map(arrays, updates)), next((at[name] for name in values), ""))
        kinds = ",".join(dict.fromkeys(node.layer.kind for node in nodes if not isinstance(node.layer, Mul)))
        cost = Cost(sum(map(net.row_flop, nodes)), moved, launches=-(-len(updates) // MAX_PARAMETERS))
        yield Claim(
            self.name, f"{self.name}<{kinds}>", names, cost, "one pass over each parameter, in place", recipes,
            facts=lowering, updates_in_place=True,
        )  # fmt: skip


def _why_not(net: Network, update: ParameterUpdate) -> str:
    """Why the kernel cannot update a weight: for its dtypes. "" if it can."""
    (weight, _), *others = update.replaced
    dtype, gradient = net.weight_type(weight).dtype, net.types[update.gradient].dtype
    if {dtype, gradient} - DTYPES.keys():
        return f"computes on {', '.join(DTYPES)}, not {dtype} and {gradient}"
    if {net.weight_type(name).dtype for name, _ in others} - {accumulated(dtype)}:
        return f"supports moments and an average of {accumulated(dtype)} for a weight of {dtype}"
    if update.scale and net.weight_type(update.scale).dtype != gradient:
        return "supports a scale of the gradient's dtype"
    return ""


INSTANCES = (
    instance(
        "Adam",
        UpdateLowering(
            (ParameterArrays(ADAM, "float32", "float32", 1 << 20, 0, (("w0", 0),), "", 0.0, 0.0, (), 0.9),), "v"
        ),
    ),
)
