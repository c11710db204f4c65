"""Every network of the tests of CPU engines, by name: what runs there runs on a GPU, too."""

from __future__ import annotations

import itertools
import multiprocessing
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import gpu_networks
import image_networks
import layer_cases
import mlp_networks
import onnx_models
import text_networks
from onchip.kernels.cuda.program import Program
from onchip.plan.device import H200
from onchip.plan.kernel import Job
from onchip.plan.plan import Plan
from onchip.plan.planner import make_plan
from onchip.runtime.cuda.nvrtc import compile_program
from onchip.runtime.engine import kernels_for
from onchip.spec.network import Network

FOLDS = 10**9  # rows for which a table is always worth building
BATCHES = (0, 160, 4097)  # none, those of the judge a second time, several tiles of every kernel and a part of one
FLOAT32_PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
# Networks of other dtypes are computed in their own; a GPU's fp32 leaves float64 as it is.
OWN_PRECISION = {"float16": "fp16", "bfloat16": "bf16", "float64": "fp32"}


@dataclass(frozen=True)
class Judged:
    """A network in a precision, planned for so many rows."""

    name: str
    net: Network
    precision: str
    batch_hint: int = 1024
    dtype: str = "float32"

    def __str__(self) -> str:
        return f"{self.name}, {self.precision}"

    @property
    def plan(self) -> Plan:
        """For an H200; PlanError where its kernels leave a layer out."""
        return make_plan(self.net, H200, kernels_for(H200), Job(self.precision, self.batch_hint))


def float32_networks() -> Iterator[tuple[str, Network, int]]:
    """Name, network, rows that it is planned for."""
    for case in (*layer_cases.CASES, *layer_cases.WIDE):
        yield str(case), layer_cases.network(case), 1024
    for name, net in (*mlp_networks.NETWORKS.items(), *image_networks.NETWORKS.items()):
        yield name, net, 1024
    for make in (image_networks.clipped, image_networks.branched, image_networks.signal):
        yield make.__name__, make(), 1024
    for name, net in text_networks.NETWORKS.items():
        yield f"text: {name}", net, 1024
        yield f"text: {name}, folded", net, FOLDS
    yield "every layer", onnx_models.every_layer(), 1024
    yield "image layers", onnx_models.image_layers(), 1024
    yield "two groups", gpu_networks.two_groups(), 1024
    yield "two towers", gpu_networks.two_towers(), 1024


def every_network() -> list[Judged]:
    found = [Judged(name, net, p, rows) for name, net, rows in float32_networks() for p in FLOAT32_PRECISIONS]
    for dtype, precision in OWN_PRECISION.items():
        networks = {str(case): layer_cases.network(case, dtype) for case in layer_cases.CASES}
        networks["every layer"] = onnx_models.every_layer(dtype)
        networks["image layers"] = onnx_models.image_layers(dtype)
        found += [Judged(f"{name}, {dtype}", net, precision, dtype=dtype) for name, net in networks.items()]
    return found


def programs_of(plans: Iterable[Plan], batches: Iterable[int]) -> set[Program]:
    """What these plans launch for so many rows."""
    sizes = tuple(batches)
    return {
        launch.program
        for plan in plans
        for group in plan.groups
        if not group.claim.is_view
        for B in (plan.job.batch, *sizes)
        for launch in group.claim.facts.at(B).launches
    }


def compile_ahead(programs: Iterable[Program], arch: str) -> None:
    """Fill the cache of compiled kernels, in processes: one after the other, they take longer than all the tests."""
    tasks = sorted(programs, key=lambda program: program.name_expression)
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn")) as pool:
        list(pool.map(compile_program, tasks, itertools.repeat(arch), chunksize=2))
