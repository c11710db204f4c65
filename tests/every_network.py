"""Every network of the tests of CPU engines, by name: what runs there runs on a GPU, too."""

from __future__ import annotations

import itertools
import multiprocessing
import os
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import gpu_networks
import image_networks
import layer_cases
import mlp_networks
import onnx_models
import small_reports
import text_networks
from onchip.kernels.cuda.common.program import Program
from onchip.network.graph import Network
from onchip.plan.device import H200
from onchip.plan.kernel import Job
from onchip.plan.plan import Plan
from onchip.plan.planner import make_plan
from onchip.runtime.cuda.nvrtc import compile_program
from onchip.runtime.placement import kernels_for

FOLDS = 10**9  # rows for which a table is always worth building
BATCHES = (0, 160, 4097)  # none, those of the judge a second time, several tiles of every kernel and a part of one
PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
# Networks of other dtypes are computed in their own; a GPU's fp32 leaves float64 as it is.
OWN_PRECISION = {"float16": "fp16", "bfloat16": "bf16", "float64": "fp32"}


def different_plans(net: Network, precisions: Iterable[str] = PRECISIONS, batch_hint: int = 1024) -> dict[str, Plan]:
    """Precision -> plan for an H200, but for those that compute what one before does: precision is of products.

    PlanError where its kernels leave a layer out.
    """
    found: dict[str, Plan] = {}
    for precision in precisions:
        plan = make_plan(net, H200, kernels_for(H200), Job(precision, batch_hint))
        if _work(plan) not in map(_work, found.values()):
            found[precision] = plan
    return found


def _work(plan: Plan) -> list[tuple[object, ...]]:
    return [(group.claim.label, group.claim.nodes, dict(group.claim.recipes)) for group in plan.groups]


@dataclass(frozen=True)
class TestedNetwork:
    __test__ = False  # pytest: it is no test itself

    net: Network
    precisions: tuple[str, ...] = PRECISIONS
    batch_hint: int = 1024
    dtype: str = "float32"

    @property
    def plans(self) -> dict[str, Plan]:
        return different_plans(self.net, self.precisions, self.batch_hint)


def every_network() -> dict[str, TestedNetwork]:
    found = {str(case): TestedNetwork(layer_cases.network(case)) for case in (*layer_cases.CASES, *layer_cases.WIDE)}
    for networks in (mlp_networks.NETWORKS, image_networks.NETWORKS):
        found |= {name: TestedNetwork(net) for name, net in networks.items()}
    images = image_networks.sines, image_networks.branched, image_networks.signal, onnx_models.image_layers
    for make in (*images, onnx_models.every_layer, gpu_networks.two_groups, gpu_networks.two_towers):
        found[make.__name__] = TestedNetwork(make())
    found["faces"] = TestedNetwork(small_reports.small_faces())
    texts = {**text_networks.NETWORKS, "sentiment": small_reports.small_sentiment()}
    for name, net in texts.items():
        found[f"text: {name}"] = TestedNetwork(net)
        found[f"text: {name}, folded"] = TestedNetwork(net, batch_hint=FOLDS)
    for dtype, precision in OWN_PRECISION.items():
        networks = {str(case): layer_cases.network(case, dtype) for case in layer_cases.CASES}
        networks["every_layer"] = onnx_models.every_layer(dtype)
        networks["image_layers"] = onnx_models.image_layers(dtype)
        found |= {f"{name}, {dtype}": TestedNetwork(net, (precision,), dtype=dtype) for name, net in networks.items()}
    return found


def programs_of(plans: Iterable[Plan], batches: Iterable[int]) -> set[Program]:
    """What these plans launch for so many rows."""
    sizes = tuple(batches)
    return {
        launch.program
        for plan in plans
        for group in plan.groups
        if not group.claim.is_view
        for B in sizes
        for launch in group.claim.facts.at(B).launches
    }


def compile_ahead(programs: Iterable[Program], arch: str) -> None:
    """Fill the cache of compiled kernels, in processes: one after the other, they take longer than all the tests."""
    tasks = sorted(programs, key=lambda program: program.name_expression)
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn")) as pool:
        list(pool.map(compile_program, tasks, itertools.repeat(arch), chunksize=2))
