"""Where derived weights (recipes) are computed, and the estimated cost. Pure data: needs no device.

A GPU computes a recipe whose operation one of its kernels supports and which would take NumPy long. NumPy computes all
others on the host, and they are copied over the bus.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from onchip.network.recipe import Recipe, Weight, as_is, in_order, op_name
from onchip.network.types import DTYPE_BYTES
from onchip.plan.device import Device
from onchip.plan.kernel import Kernel, RecipeMaker

HOST_FLOPS = 50e9  # of NumPy's matmul on the host of a GPU, about two cores
# Bytes/s that NumPy writes to untouched memory: measured with token_tables at small K.
HOST_BANDWIDTH = 2e9
BUS_BANDWIDTH = 10e9  # bytes/s from pageable memory to a GPU, copied by one core
ON_DEVICE_FROM_US = 1000.0  # of NumPy time; below this, loading a kernel takes longer
DEVICE_DTYPES = ("float32", "float16", "bfloat16")

Weights = Mapping[str, Weight]


def makes_of(kernels: Sequence[Kernel], device: Device) -> dict[str, float]:
    """The recipe operations that a device's kernels support: operation -> fraction of its fp32 rate."""
    makers = [k for k in kernels if k.device_kind == device.kind and isinstance(k, RecipeMaker)]
    return {op: rate for maker in makers for op, rate in maker.makes.items()}


def build_us(recipes: Iterable[Recipe], weights: Weights, device: Device, makes: Mapping[str, float]) -> float:
    """Microseconds to compute these recipes, each where it will be computed. Sources not among them are ready there.

    weights  the network's weights, by the names that recipes use for their sources
    makes    makes_of the kernels of the plan
    """
    wanted = dict.fromkeys(recipes)
    if device.kind == "cpu":
        return sum(host_us(recipe, weights, device.flops["fp32"]) for recipe in wanted)
    there = made_on_device(wanted, weights, makes)
    on_host = [recipe for recipe in wanted if recipe not in there]
    read_on_host = {canonical(source, weights) for recipe in on_host for source in recipe.sources}
    # Each copied once: device reads computed elsewhere, host results the host does not read, device results it does.
    crossing = {c for recipe in there & wanted.keys() for c in _sources(recipe, weights) if c not in there}
    crossing |= {recipe for recipe in on_host if recipe not in read_on_host} | (read_on_host & there)
    seconds = sum(_nbytes(each, weights) for each in crossing) / BUS_BANDWIDTH
    for recipe in there & wanted.keys():
        moved = recipe.nbytes + sum(_nbytes(source, weights) for source in _sources(recipe, weights))
        rate = makes[recipe.op] * device.flops["fp32"]
        seconds += max(recipe.flop / rate, moved / device.bandwidth) + device.launch_us * 1e-6
    return seconds * 1e6 + sum(host_us(recipe, weights) for recipe in on_host)


def host_us(recipe: Recipe, weights: Weights, flops: float = HOST_FLOPS) -> float:
    """Microseconds that NumPy takes: flop, plus first-touch writes."""
    written = 0 if is_another_name(recipe, weights) else recipe.nbytes
    return (recipe.flop / flops + written / HOST_BANDWIDTH) * 1e6


def made_on_device(wanted: Iterable[Recipe], weights: Weights, makes: Mapping[str, float]) -> set[Recipe]:
    """Which of these recipes, and of their dependencies, are computed on the device and not by NumPy."""
    there: set[str | Recipe] = set()
    for name in in_order(wanted, weights) if makes else ():
        recipe = canonical(name, weights)
        if not isinstance(recipe, Recipe) or recipe.op not in makes:
            continue
        sources = _sources(recipe, weights)
        fits = {dtype_of(source, weights) for source in sources} <= set(DEVICE_DTYPES)
        fits &= recipe.dtype in (*DEVICE_DTYPES, "float8_e4m3fn")  # fp8: tables only
        # A recipe with a source on the device is computed there too, so the source need not be copied back.
        if fits and (host_us(recipe, weights) >= ON_DEVICE_FROM_US or not there.isdisjoint(sources)):
            there.add(recipe)
    return {recipe for recipe in there if isinstance(recipe, Recipe)}


def is_another_name(recipe: Recipe, weights: Weights) -> bool:
    """Whether the recipe is its source unchanged, so that there is nothing to compute."""
    return recipe.op == op_name(as_is) and dtype_of(recipe.sources[0], weights) == recipe.dtype


def canonical(name: str | Recipe, weights: Weights) -> str | Recipe:
    """One key per weight: the recipe that a name refers to, or the name of an array."""
    weight = None if isinstance(name, Recipe) else weights[name]
    return weight if isinstance(weight, Recipe) else name


def dtype_of(name: str | Recipe, weights: Weights) -> str:
    weight = name if isinstance(name, Recipe) else weights[name]
    return weight.dtype if isinstance(weight, Recipe) else weight.dtype.name


def shape_of(name: str | Recipe, weights: Weights) -> tuple[int, ...]:
    return (name if isinstance(name, Recipe) else weights[name]).shape


def _sources(recipe: Recipe, weights: Weights) -> list[str | Recipe]:
    return [canonical(source, weights) for source in recipe.sources]


def _nbytes(name: str | Recipe, weights: Weights) -> int:
    return math.prod(shape_of(name, weights)) * DTYPE_BYTES[dtype_of(name, weights)]
