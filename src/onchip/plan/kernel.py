"""What the planner asks and a kernel answers: do you fit, what do you cost, what do you need?

A kernel may claim any run of consecutive nodes: one layer, a whole MLP, a whole training step. It is
handed to the planner as an argument; the planner knows kernels only by this file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
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
LOSSES = ("cross_entropy", "half_sse", "mse")
OPTIMISERS = {"sgd": 0, "momentum": 1, "adam": 2, "adamw": 2}  # with how many numbers each keeps for every weight
OPTIONAL_REWRITES = ("fold", "merge", "windows", "phases", "early")  # those that a user may leave out, to compare
MAX_NORM = 3.4028234e38  # float32's largest
MAX_ROWS = 2**62  # more than any memory or disk holds
TABLES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "fp8": "float8_e4m3fn"}


@dataclass(frozen=True)
class Job:
    """What is to be done with the network."""

    precision: str = "fp32"
    batch: int = 1024  # rows the plan is priced for, all together; a compiled plan runs any number
    loss: str = ""  # set: train. Of LOSSES; for "cross_entropy" the network's output is logits
    optimiser: str = "sgd"  # of OPTIMISERS
    without: tuple[str, ...] = ()  # rewrites to leave out, of OPTIONAL_REWRITES
    tables: str = "fp32"  # how folded tables are stored; sums are float32, of fp8 ones float16
    byte_scale: float = 0.0  # set: rows to train on are bytes times this
    label_smoothing: float = 0.0  # of "cross_entropy": the share of a target that all classes have alike
    clip_norm: float = 0.0  # set: gradients are scaled down to this norm
    is_weighted: bool = False  # rows to train on have weights

    def __post_init__(self) -> None:
        self._spell("precision", PRECISIONS)
        if not isinstance(self.batch, int) or not 1 <= self.batch <= MAX_ROWS:
            expected = f"at least 1, at most {MAX_ROWS:,}"
            raise InputError("bad number of rows in a batch", got=show(self.batch), expected=expected, hint="1024")
        if self.loss:
            self._spell("loss", LOSSES)
        self._spell("optimiser", OPTIMISERS)
        self._spell("tables", TABLES)
        left_out = tuple(known_name(name, OPTIONAL_REWRITES, "rewrite to leave out") for name in self.without)
        object.__setattr__(self, "without", left_out)
        if not isinstance(self.byte_scale, float) or not 0 <= self.byte_scale <= 1:
            raise InputError("bad scale of bytes", got=show(self.byte_scale), expected="0.0 to 1.0", hint="0.0: none")
        for name, most in (("label_smoothing", 1.0), ("clip_norm", MAX_NORM)):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not 0 <= value <= most:
                raise InputError(f"bad {name}", got=show(value), expected=f"0 to {most:g}", hint="0: none")
        if not isinstance(self.is_weighted, bool):
            raise InputError("bad is_weighted", got=show(self.is_weighted), expected="true or false", hint="false")

    def _spell(self, field: str, known: Iterable[str]) -> None:
        object.__setattr__(self, field, known_name(getattr(self, field), known, field, hint=next(iter(known))))

    @property
    def is_training(self) -> bool:
        return bool(self.loss)


@dataclass(frozen=True)
class Price:
    """The work of a claim: a part for each row and a part for each launch."""

    row_flop: int
    row_bytes: int
    fixed_bytes: int = 0  # weights, read (and in training written) once a launch
    launches: int = 1
    precision: str = ""  # of the flop, where it is not the job's
    rate: float = 1.0  # share of the device's steady flop/s that the kernel reaches, for the estimate
    turned_bytes: int = 0  # of a row's, those that are put in another order first or last: a pass of its own
    why_slow: str = ""  # what keeps it above its floor, where no other number here tells
    least_us: float = 0.0  # of a launch's work, however few flop and bytes: what a block does one after the other

    def floor_us(self, device: Device, precision: str, B: int) -> float:
        """No run of this work on this device is faster: its peak rates, and data in the cache where it fits."""
        peak, nbytes = device.peak, self.row_bytes * B + self.fixed_bytes
        compute = self.row_flop * B / peak.flops[self.precision or precision]
        memory = nbytes / (peak.cache_bandwidth if nbytes <= device.cache_bytes else peak.bandwidth)
        return max(compute, memory) * 1e6 + self.launches * peak.launch_us

    def estimate_us(self, device: Device, precision: str, B: int) -> float:
        """About what a run takes, in steady work: what plans are compared by."""
        compute = self.row_flop * B / (self.rate * device.flops[self.precision or precision])
        memory = (self.row_bytes * B + self.fixed_bytes) / device.bandwidth
        turned = self.turned_bytes * B / device.bandwidth
        launch_us = device.graph_launch_us or device.launch_us  # a network's launches are one graph
        return max((max(compute, memory) + turned) * 1e6, self.least_us) + self.launches * launch_us


@dataclass(frozen=True)
class Use:
    """How a claim takes a value that it reads."""

    layout: str = ROWS  # of plan/layout.py
    is_read_often: bool = False  # more than once: it should not lie across a bus


@dataclass(frozen=True, eq=False)
class Claim:
    """A kernel's yes."""

    kernel: str
    label: str  # the kernel with what it is made for: widths, activations
    nodes: tuple[str, ...]  # names of the claimed nodes, in order
    price: Price
    why: str
    recipes: Mapping[str, Recipe] = field(default_factory=dict)  # weights in the layout it wants, by its own names
    fast_bytes: int = 0  # shared memory a block, or cache a thread
    order: str = ""  # of its sums: which terms come first, the same for every number of rows; "" where it has none
    facts: object = None  # what the kernel itself needs to launch; opaque to the planner
    reads: Mapping[str, Use] = field(default_factory=dict)  # the values that it takes otherwise than in rows, read once
    gives: Mapping[str, str] = field(default_factory=dict)  # and the layouts of those that it makes otherwise
    is_view: bool = False  # what it makes is what it reads, seen otherwise: nothing is launched
    is_fallback: bool = False  # of a kernel that claims any layer: used only where no other kernel claims it

    def __post_init__(self) -> None:
        for name in ("recipes", "reads", "gives"):
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))

    def __reduce__(self) -> tuple[object, ...]:
        """For copies and other processes: a mapping that cannot be changed cannot be pickled either."""
        values = (getattr(self, each.name) for each in fields(self))
        return Claim, tuple(dict(v) if isinstance(v, MappingProxyType) else v for v in values)

    def layout_read(self, value: str) -> str:
        return self.reads[value].layout if value in self.reads else ROWS

    @property
    def has_layouts(self) -> bool:
        """Whether it takes or gives anything otherwise than in rows."""
        return bool(self.gives) or any(use.layout != ROWS for use in self.reads.values())

    @property
    def build_flop(self) -> int:
        return sum(recipe.flop for recipe in self.recipes.values())

    @property
    def weight_bytes(self) -> int:
        return sum(recipe.nbytes for recipe in self.recipes.values())


@dataclass(frozen=True)
class Refusal:
    """A kernel's no, at one node, with its reason."""

    kernel: str
    node: str
    why: str


class Kernel(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def device_kind(self) -> str: ...
    @property
    def precisions(self) -> tuple[str, ...]: ...

    def claims(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim | Refusal]:
        """Every run of nodes beginning at net.nodes[start] that this kernel could take, or why it cannot.

        A kernel that has nothing to do with the node yields nothing: silence is not a refusal.
        """
        ...


@runtime_checkable
class Converter(Protocol):
    """A kernel that moves a value from one layout to another."""

    @property
    def device_kind(self) -> str: ...

    def conversion(self, net: Network, value: str, given: str, wanted: str, device: Device, job: Job) -> Claim | None:
        """A claim of no nodes that reads the value in one layout and gives it in another; None if it cannot."""
        ...


@runtime_checkable
class RecipeMaker(Protocol):
    """A kernel that makes weights on its device, too."""

    @property
    def makes(self) -> Mapping[str, float]:
        """Of recipes: operation -> the share of the device's fp32 flop/s that it makes them at."""
        ...
