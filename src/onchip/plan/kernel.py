"""The interface between planner and kernels: does it fit, what does it cost, what does it need?

A kernel may claim any consecutive nodes: one layer, a whole MLP, a whole training step. The planner receives the
kernels as an argument and knows them only through this file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from onchip.errors import InputError
from onchip.network.names import known_name
from onchip.network.reading import show
from onchip.plan.device import Device
from onchip.plan.layout import ROWS

if TYPE_CHECKING:
    from onchip.network.graph import Network
    from onchip.network.recipe import Recipe

TRAINING_PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
PRECISIONS = (*TRAINING_PRECISIONS, "fp8")
OPTIONAL_REWRITES = ("fold", "merge", "windows", "phases", "early")  # rewrites that a user may leave out, to compare
MAX_ROWS = 2**62  # more than any memory or disk holds
TABLES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "fp8": "float8_e4m3fn"}


@dataclass(frozen=True)
class Job:
    """How to run a network."""

    precision: str = "fp32"
    batch: int = 1024  # rows, per training step or in all, that the plan is estimated for; a plan runs any number
    without: tuple[str, ...] = ()  # rewrites to leave out, of OPTIONAL_REWRITES
    tables: str = "fp32"  # dtype of folded tables; accumulation is float32, float16 for fp8 tables

    def __post_init__(self) -> None:
        _normalise(self, "precision", PRECISIONS)
        if not isinstance(self.batch, int) or not 1 <= self.batch <= MAX_ROWS:
            expected = f"at least 1, at most {MAX_ROWS:,}"
            raise InputError("bad batch size", got=show(self.batch), expected=expected, hint="1024")
        left_out = tuple(known_name(name, OPTIONAL_REWRITES, "rewrite to leave out") for name in self.without)
        object.__setattr__(self, "without", left_out)
        _normalise(self, "tables", TABLES)


def _normalise(of: Job, name: str, known: Iterable[str]) -> None:
    object.__setattr__(of, name, known_name(getattr(of, name), known, name, hint=next(iter(known))))


@dataclass(frozen=True)
class Cost:
    """The work of a claim, per row and per launch."""

    row_flop: int
    row_bytes: int
    fixed_bytes: int = 0  # weights, read (and in training written) once per launch
    launches: int = 1
    precision: str = ""  # of the flop, if it is not the job's
    rate: float = 1.0  # fraction of the device's sustained flop/s that the kernel reaches, for the estimate
    transposed_bytes: int = 0  # bytes per row that are reordered before or after: a separate pass
    why_slow: str = ""  # what keeps it above its floor, where no other field explains it
    min_us: float = 0.0  # the time of one block's sequential work: no launch is faster, however few its rows
    has_one_row: bool = False  # whatever the batch

    def nbytes(self, B: int) -> int:
        return self.row_bytes * self.rows(B) + self.fixed_bytes

    def flop(self, B: int) -> int:
        return self.row_flop * self.rows(B)

    def rows(self, B: int) -> int:
        return 1 if self.has_one_row else B

    def floor_us(self, device: Device, precision: str, B: int) -> float:
        """The least time of this work on this device: peak rates, and cache bandwidth where the data fits the cache."""
        peak, nbytes = device.peak, self.nbytes(B)
        compute = self.flop(B) / peak.flops[self.precision or precision]
        memory = nbytes / (peak.cache_bandwidth if nbytes <= device.cache_bytes else peak.bandwidth)
        return max(compute, memory) * 1e6 + self.launches * peak.launch_us

    def estimate_us(self, device: Device, precision: str, B: int) -> float:
        """The expected time at sustained rates; plans are compared by it."""
        compute = self.flop(B) / (self.rate * device.flops[self.precision or precision])
        memory = self.nbytes(B) / device.bandwidth
        transposed = self.transposed_bytes * self.rows(B) / device.bandwidth
        launch_us = device.graph_launch_us or device.launch_us  # a network's launches are one graph
        return max((max(compute, memory) + transposed) * 1e6, self.min_us) + self.launches * launch_us


@dataclass(frozen=True)
class Use:
    """How a claim reads a value."""

    layout: str = ROWS  # one of plan/layout.py
    is_read_often: bool = False  # more than once: it should not be read over the bus


@dataclass(frozen=True, eq=False)
class Claim:
    """A kernel's offer to run some nodes."""

    kernel: str
    label: str  # the kernel with its template arguments: widths, activations
    nodes: tuple[str, ...]  # names of the claimed nodes, in order
    cost: Cost
    why: str
    recipes: Mapping[str, Recipe] = field(default_factory=dict)  # weights in the kernel's layout, by the kernel's names
    fast_bytes: int = 0  # shared memory per block, or cache per thread
    order: str = ""  # the reduction order, the same for every number of rows; "" if there is no reduction
    facts: object = None  # what the kernel needs to launch; opaque to the planner
    reads: Mapping[str, Use] = field(default_factory=dict)  # the values that it does not read in ROWS exactly once
    writes: Mapping[str, str] = field(default_factory=dict)  # the layouts of values that it does not write in ROWS
    is_view: bool = False  # its output is a view of its input: nothing is launched
    is_fallback: bool = False  # used only if no other kernel claims the layer
    # Its outputs may be written over the state that they replace: each element depends on no other element of it.
    updates_in_place: bool = False

    def __post_init__(self) -> None:
        for name in ("recipes", "reads", "writes"):
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))

    def __reduce__(self) -> tuple[object, ...]:
        """For copy and pickle: a MappingProxyType cannot be pickled."""
        values = (getattr(self, each.name) for each in fields(self))
        return Claim, tuple(dict(v) if isinstance(v, MappingProxyType) else v for v in values)

    def layout_read(self, value: str) -> str:
        return self.reads[value].layout if value in self.reads else ROWS

    @property
    def has_layouts(self) -> bool:
        """Whether it reads or writes any value in a layout other than ROWS."""
        return bool(self.writes) or any(use.layout != ROWS for use in self.reads.values())

    @property
    def build_flop(self) -> int:
        return sum(recipe.flop for recipe in self.recipes.values())

    @property
    def weight_bytes(self) -> int:
        return sum(recipe.nbytes for recipe in self.recipes.values())


def for_rows_of(claim: Claim, net: Network) -> Claim:
    """The claim, with the cost of one row if its layers compute on one, whatever the batch."""
    if not claim.nodes or net.types[net.by_name[claim.nodes[0]].inputs[0]].is_batched:
        return claim
    return replace(claim, cost=replace(claim.cost, has_one_row=True))


def runs_whole_step(claim: Claim, net: Network) -> bool:
    """Whether the claim is a StepKernel's."""
    return net.trained is not None and len(claim.nodes) == len(net.nodes)


@dataclass(frozen=True)
class Refusal:
    """Why a kernel cannot run a node."""

    kernel: str
    node: str
    why: str


def by_reason(refusals: Iterable[Refusal]) -> list[Refusal]:
    """One Refusal per layer and reason; `kernel` lists all kernels with that reason."""
    kernels: dict[tuple[str, str], list[str]] = {}
    for refusal in refusals:
        kernels.setdefault((refusal.node, refusal.why), []).append(refusal.kernel)
    return [Refusal(", ".join(dict.fromkeys(names)), *key) for key, names in kernels.items()]


class Kernel(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def device_kind(self) -> str: ...
    @property
    def precisions(self) -> tuple[str, ...]: ...

    def claims(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim | Refusal]:
        """A claim for each sequence of nodes from net.nodes[start] on that this kernel can run, or why it cannot.

        A kernel that does not apply to the node yields nothing; that is not a refusal.
        """
        ...


@runtime_checkable
class StepKernel(Protocol):
    """A kernel that runs whole training steps, by what the network says about them (Network.trained)."""

    @property
    def runs_whole_steps(self) -> bool: ...
    @property
    def device_kind(self) -> str: ...


@runtime_checkable
class Converter(Protocol):
    """A kernel that converts a value from one layout to another."""

    @property
    def device_kind(self) -> str: ...

    def conversion(self, net: Network, value: str, source: str, target: str, device: Device, job: Job) -> Claim | None:
        """A claim without nodes that reads the value in one layout and writes it in another; None if it cannot."""
        ...


@runtime_checkable
class RecipeKernel(Protocol):
    """A kernel that also computes weights on its device."""

    def recipe_rates(self, device: Device) -> Mapping[str, float]:
        """Recipe operation -> fraction of the device's fp32 flop/s at which the kernel computes it."""
        ...
