"""Where the weights that recipes promise are made, and what that takes. Data only: no device is needed.

On a GPU, an operation that one of its kernels makes is made there where NumPy would take long; everything else is made
by NumPy on the host and copied over the bus.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from onchip.network.recipe import Recipe, Weight, as_is, in_order, op_name
from onchip.network.types import DTYPE_BYTES
from onchip.plan.device import Device
from onchip.plan.kernel import Kernel, RecipeMaker

HOST_FLOPS = 50e9  # of NumPy's products on the host of a GPU: two cores or so
# Bytes/s that NumPy writes to memory that nobody has touched yet: of token_tables with short sums, as measured.
HOST_BANDWIDTH = 2e9
BUS_BANDWIDTH = 10e9  # bytes/s from pageable memory to a GPU: one core copies it
ON_DEVICE_FROM_US = 1000.0  # of NumPy's time: below, loading a kernel would take longer
DEVICE_DTYPES = ("float32", "float16", "bfloat16")

Weights = Mapping[str, Weight]


def makes_of(kernels: Sequence[Kernel], device: Device) -> dict[str, float]:
    """What a device's kernels make of recipes: operation -> share of its fp32 rate."""
    makers = [k for k in kernels if k.device_kind == device.kind and isinstance(k, RecipeMaker)]
    return {op: rate for maker in makers for op, rate in maker.makes.items()}


def build_us(recipes: Iterable[Recipe], weights: Weights, device: Device, makes: Mapping[str, float]) -> float:
    """Microseconds to make these recipes where they will be made; what they are made of is there, if not among them.

    weights  the network's: what recipes' sources are called
    makes    makes_of the kernels that the plan is made for
    """
    wanted = dict.fromkeys(recipes)
    if device.kind == "cpu":
        return sum(host_us(recipe, weights, device.flops["fp32"]) for recipe in wanted)
    there = made_on_device(wanted, weights, makes)
    on_host = [recipe for recipe in wanted if recipe not in there]
    read_on_host = {canonical(source, weights) for recipe in on_host for source in recipe.sources}
    # Once each: what a GPU reads that is not made there, what nobody on the host reads, what the host needs back.
    crossing = {c for recipe in there & wanted.keys() for c in _sources(recipe, weights) if c not in there}
    crossing |= {recipe for recipe in on_host if recipe not in read_on_host} | (read_on_host & there)
    seconds = sum(_nbytes(each, weights) for each in crossing) / BUS_BANDWIDTH
    for recipe in there & wanted.keys():
        moved = recipe.nbytes + sum(_nbytes(source, weights) for source in _sources(recipe, weights))
        rate = makes[recipe.op] * device.flops["fp32"]
        seconds += max(recipe.flop / rate, moved / device.bandwidth) + device.launch_us * 1e-6
    return seconds * 1e6 + sum(host_us(recipe, weights) for recipe in on_host)


def host_us(recipe: Recipe, weights: Weights, flops: float = HOST_FLOPS) -> float:
    """Microseconds that NumPy takes: products, and memory that is written for the first time."""
    written = 0 if is_another_name(recipe, weights) else recipe.nbytes
    return (recipe.flop / flops + written / HOST_BANDWIDTH) * 1e6


def made_on_device(wanted: Iterable[Recipe], weights: Weights, makes: Mapping[str, float]) -> set[Recipe]:
    """Which of these recipes, and of those that they need, are made on the device and not by NumPy."""
    there: set[str | Recipe] = set()
    for name in in_order(wanted, weights) if makes else ():
        recipe = canonical(name, weights)
        if not isinstance(recipe, Recipe) or recipe.op not in makes:
            continue
        sources = _sources(recipe, weights)
        fits = {dtype_of(source, weights) for source in sources} <= set(DEVICE_DTYPES)
        fits &= recipe.dtype in (*DEVICE_DTYPES, "float8_e4m3fn")  # which only tables are made into
        # What is made of something there is made there as well: it need not come back.
        if fits and (host_us(recipe, weights) >= ON_DEVICE_FROM_US or not there.isdisjoint(sources)):
            there.add(recipe)
    return {recipe for recipe in there if isinstance(recipe, Recipe)}


def is_another_name(recipe: Recipe, weights: Weights) -> bool:
    """Whether it is its source, and nothing has to be made."""
    return recipe.op == op_name(as_is) and dtype_of(recipe.sources[0], weights) == recipe.dtype


def canonical(name: str | Recipe, weights: Weights) -> str | Recipe:
    """One key for one weight: the recipe behind a name, or the name of an array."""
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
