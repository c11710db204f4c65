"""A training step of a network as a job: onchip and peers run it over rows that stay on the device.

Every engine is checked before it is timed: its first step, over a few rows, against float64.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from onchip.bench.cases.inference import PEER_SLACK
from onchip.bench.cases.training_networks import TrainedNetwork
from onchip.bench.frame import Ready, UnavailableError
from onchip.bench.gpu_clock import GpuClock
from onchip.bench.peers.cpu import explained
from onchip.bench.stage import Stage, make_stage, repeat
from onchip.errors import DeviceError, PlanError
from onchip.kernels import reference
from onchip.measure.truth import Verdict, allowed_error, relative_error
from onchip.network.graph import Network
from onchip.network.layers import Dropout, Identity
from onchip.network.layers.optimiser import BETA2
from onchip.network.recipe import Array, materialise
from onchip.network.training import BETA1
from onchip.network.types import numpy_dtype
from onchip.plan.gradient.step import VALUES, training_step
from onchip.plan.kernel import Job
from onchip.runtime.cpu.step import CpuStep
from onchip.runtime.placement import plan

LR = 1e-5  # with larger ones the second loss depends on the signs of gradients that are nearly 0
CHECKED_ROWS = 4  # of the step that is compared with float64
CALLS = 10  # per sample
# Added to twice the error of a naive float32 step: what products of 11 or 8 bits change in a loss.
ROUNDING = {"fp32": 2**-17, "tf32": 2**-7, "bf16": 2**-4, "fp16": 2**-7}

# By the network's name and whether elements are dropped: for jobs of every precision and batch.
TRUTHS: dict[tuple[str, bool], tuple[Array, float]] = {}


@dataclass(frozen=True, eq=False)
class StepJob:
    """A case: steps of a network over the same rows."""

    name: str
    network: TrainedNetwork
    batch: int
    precision: str
    device: str
    threads: int

    drops: bool = True  # whether dropouts drop

    @functools.cached_property
    def net(self) -> Network:
        net = self.network.build()
        if self.drops:
            return net
        layers = [Identity() if isinstance(node.layer, Dropout) else node.layer for node in net.nodes]
        return net.replace(nodes=[replace(node, layer=layer) for node, layer in zip(net.nodes, layers, strict=True)])

    @property
    def trainable(self) -> list[str]:
        """The weights that a trained network may change, in the order of their first use."""
        uses = [(name, role in node.layer.constants) for node in self.net.nodes for role, name in node.weights.items()]
        floats = {name for name, _ in uses if "float" in self.net.weight_type(name).dtype}
        return [name for name in dict.fromkeys(name for name, is_constant in uses if not is_constant) if name in floats]

    @functools.cached_property
    def step(self) -> Network:
        return training_step(self.net, self.network.step, trainable=self.network.is_trained)

    def rows(self, B: int) -> dict[str, Array]:
        """The inputs of the step, by name."""
        rng, classes = np.random.default_rng(B), int(self.net.output.shape[-1])
        rows: dict[str, Array] = {}
        for name, kind in self.step.inputs.items():
            if name == "share":
                rows[name] = np.full(B, 1 / B, np.float32)
            elif "int" in kind.dtype:
                below = classes if name == "target" else self._vocabulary
                rows[name] = rng.integers(0, below, (B, *kind.row_shape)).astype(numpy_dtype(kind.dtype))
            else:
                rows[name] = rng.standard_normal((B, *kind.row_shape), np.float32)
        return rows

    @property
    def _vocabulary(self) -> int:
        tables = [node.weights["weight"] for node in self.net.nodes if node.layer.kind == "Embedding"]
        return min(self.net.weights[name].shape[0] for name in tables)

    def state(self) -> dict[str, Array]:
        """The state before the first step."""
        state = {name: materialise(name, self.step.weights) for name in self.step.state}
        state[VALUES] = np.array([LR, 0, 0, 1 - BETA1, 1 - BETA2], np.float32)
        return state

    @property
    def truth(self) -> tuple[Array, float]:
        """The loss of the first step over CHECKED_ROWS, then that of the second; and the allowed error."""
        key = self.name, self.drops and any(isinstance(node.layer, Dropout) for node in self.net.nodes)
        if key not in TRUTHS:
            runs = {dtype: self._losses(dtype) for dtype in ("float64", "float32")}
            TRUTHS[key] = runs["float64"], allowed_error(relative_error(runs["float32"], runs["float64"]))
        return TRUTHS[key]

    def _losses(self, dtype: str) -> Array:
        state, losses, rows = self.state(), [], tuple(self.rows(CHECKED_ROWS).values())
        for _ in range(2):
            loss, state = reference.run_step(self.step, rows, state, dtype)
            losses.append(float(np.asarray(loss).reshape(-1)[0]))
        return np.array(losses)

    def verify(self, losses: Array, slack: float = 1.0) -> Verdict:
        """losses: of the first two steps over CHECKED_ROWS."""
        truth, allowed = self.truth
        return Verdict(
            relative_error(np.asarray(losses, np.float64), truth), slack * (allowed + ROUNDING[self.precision])
        )


class PeerStep(Protocol):
    """A peer's network and its optimiser."""

    setting: str

    def losses(self, rows: Mapping[str, Array], count: int) -> Array:
        """The losses of the first steps over these rows."""

    def prepare(self, rows: Mapping[str, Array]) -> Callable[[], Any]:
        """A function that runs a step over these rows."""


def floor_ms(job: StepJob) -> float:
    return plan(job.step, job.device, Job(job.precision, job.batch)).floor_us / 1e3


# -- onchip ------------------------------------------------------------------------------------------------


def ours(job: StepJob) -> Ready:
    try:
        planned = plan(job.step, job.device, Job(job.precision, job.batch))
    except (DeviceError, PlanError) as refused:
        raise UnavailableError(f"no kernel for {job.name}, {job.precision}: {refused.what}") from None
    setting = f"{len(planned.groups)} groups, the same rows in every step"
    few, many, state = job.rows(CHECKED_ROWS), job.rows(job.batch), job.state()
    if job.device == "cpu":
        cpu = CpuStep(planned, job.threads)

        def check_cpu() -> Verdict:
            for name, array in state.items():
                cpu.state[name][...] = array
            return job.verify(np.array([cpu.run(few, CHECKED_ROWS)["loss"].item() for _ in range(2)]))

        return Ready(functools.partial(cpu.run, many, job.batch), check_cpu, setting)

    from onchip.runtime.cuda.gpu import Gpu
    from onchip.runtime.cuda.step import CudaStep

    index = int(job.device.partition(":")[2] or 0)
    stage, bound = make_stage(index), CudaStep(Gpu.get(index), planned)
    run = functools.partial(repeat, _gpu_step(bound, stage, many), CALLS)

    def check() -> Verdict:
        bound.write_state(state)
        verdict = job.verify(np.array([bound.run(few, CHECKED_ROWS)["loss"].item() for _ in range(2)]))
        run()
        return verdict

    return Ready(GpuClock(stage, run, CALLS), check, setting)


def _gpu_step(bound: Any, stage: Stage, rows: Mapping[str, Array]) -> Callable[[], None]:
    """A function that enqueues a step over these rows."""
    B = len(rows["share"])
    held = {name: stage.put(array, array.dtype.name) for name, array in rows.items()}
    held["loss"] = stage.empty((1,), "float32")
    pointers = {name: int(array.__cuda_array_interface__["data"][0]) for name, array in held.items()}

    def step(held: object = held) -> None:
        bound.enqueue(pointers, B, stage.stream)

    return step


# -- peers -------------------------------------------------------------------------------------------------


def theirs(job: StepJob, name: str, build: Callable[[StepJob, Any], PeerStep]) -> Ready:
    stage = None if job.device == "cpu" else make_stage(int(job.device.partition(":")[2] or 0))
    checked = replace(job, drops=False)  # each engine drops other elements
    with explained(name):
        losses = build(checked, stage).losses(checked.rows(CHECKED_ROWS), 2)
        peer = build(job, stage)
        step = peer.prepare(job.rows(job.batch))
    verify = functools.partial(checked.verify, losses, PEER_SLACK)
    if stage is None:
        return Ready(step, verify, peer.setting)
    return Ready(GpuClock(stage, functools.partial(repeat, step, CALLS), CALLS), verify, peer.setting)
