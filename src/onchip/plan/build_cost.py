"""Where derived weights (recipes) are computed, and the estimated cost. Pure data: needs no device.

A recipe is computed on the GPU if a kernel supports its operation and NumPy would take long. NumPy computes the others
on the host, and the results are copied over the bus.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from onchip.network.recipe import Recipe, Weight, as_is, in_order, op_name
from onchip.network.types import DTYPE_BYTES
from onchip.plan.device import Device
from onchip.plan.host_costs import HOST
from onchip.plan.kernel import Kernel, RecipeKernel

ON_DEVICE_FROM_US = 1000.0  # of NumPy time: below this, loading a kernel takes longer
DEVICE_DTYPES = ("float32", "float16", "bfloat16")

Weights = Mapping[str, Weight]


def recipe_rates_of(kernels: Sequence[Kernel], device: Device) -> dict[str, float]:
    """The recipe operations that a device's kernels support: operation -> fraction of its fp32 rate."""
    supporting = [k for k in kernels if k.device_kind == device.kind and isinstance(k, RecipeKernel)]
    return {op: rate for kernel in supporting for op, rate in kernel.recipe_rates(device).items()}


def build_us(recipes: Iterable[Recipe], weights: Weights, device: Device, rates: Mapping[str, float]) -> float:
    """Microseconds to compute these recipes, each on the device or the host. Other sources are assumed to exist there.

    weights  the network's weights, by the names that recipes use for their sources
    rates    recipe_rates_of the kernels of the plan
    """
    wanted = dict.fromkeys(recipes)
    if device.kind == "cpu":
        return sum(host_us(recipe, weights, device.flops["fp32"]) for recipe in wanted)
    on_device = device_recipes(wanted, weights, rates)
    on_host = [recipe for recipe in wanted if recipe not in on_device]
    read_on_host = {canonical(source, weights) for recipe in on_host for source in recipe.sources}
    # Copied over the bus, once each: what device recipes read and the device did not compute, host results that the
    # host does not read, and device results that it reads.
    crossing = {c for recipe in on_device & wanted.keys() for c in _sources(recipe, weights) if c not in on_device}
    crossing |= {recipe for recipe in on_host if recipe not in read_on_host} | (read_on_host & on_device)
    seconds = sum(_nbytes(each, weights) for each in crossing) / HOST.copy_bandwidth
    for recipe in on_device & wanted.keys():
        moved = recipe.nbytes + sum(_nbytes(source, weights) for source in _sources(recipe, weights))
        flops = rates[recipe.op] * device.flops["fp32"]
        seconds += max(recipe.flop / flops, moved / device.bandwidth) + device.launch_us * 1e-6
    return seconds * 1e6 + sum(host_us(recipe, weights) for recipe in on_host)


def host_us(recipe: Recipe, weights: Weights, flops: float = HOST.gemm_flops) -> float:
    """Microseconds that NumPy takes: flop, plus first-touch writes."""
    written = 0 if is_alias(recipe, weights) else recipe.nbytes
    return (recipe.flop / flops + written / HOST.write_bandwidth) * 1e6


def device_recipes(wanted: Iterable[Recipe], weights: Weights, rates: Mapping[str, float]) -> set[Recipe]:
    """Which of these recipes, and of their dependencies, are computed on the device and not by NumPy."""
    on_device: set[str | Recipe] = set()
    for name in in_order(wanted, weights) if rates else ():
        recipe = canonical(name, weights)
        if not isinstance(recipe, Recipe) or recipe.op not in rates:
            continue
        sources = _sources(recipe, weights)
        fits = {dtype_of(source, weights) for source in sources} <= set(DEVICE_DTYPES)
        fits &= recipe.dtype in (*DEVICE_DTYPES, "float8_e4m3fn")  # fp8: tables only
        # A recipe with a source on the device is computed there too, so the source need not be copied back.
        if fits and (host_us(recipe, weights) >= ON_DEVICE_FROM_US or not on_device.isdisjoint(sources)):
            on_device.add(recipe)
    return {recipe for recipe in on_device if isinstance(recipe, Recipe)}


def is_alias(recipe: Recipe, weights: Weights) -> bool:
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
