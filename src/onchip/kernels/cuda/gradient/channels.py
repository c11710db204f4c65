"""How blocks divide the channels of a batch, and the launch of their sums: host side of gradient/channels.cuh."""

from __future__ import annotations

from ctypes import c_int64, c_uint32
from dataclasses import dataclass, replace
from pathlib import Path

from onchip.kernels.cuda.common.arguments import NOTHING, Argument, Scratch, Struct
from onchip.kernels.cuda.common.c_struct import CStruct
from onchip.kernels.cuda.common.dtypes import FLOATS
from onchip.kernels.cuda.common.fast_divide import MAX_ELEMENTS, Divider, divider, index_of
from onchip.kernels.cuda.common.precision import round_up
from onchip.kernels.cuda.common.program import Budget, KernelLaunch, LaunchConfig, Program
from onchip.network.graph import Network
from onchip.network.types import TensorType
from onchip.plan.kernel import Claim, Use
from onchip.plan.layout import CHANNELS_LAST, ROWS
from onchip.plan.plan import values_read

SOURCE = Path(__file__).with_suffix(".cuh")
THREADS, MAX_COLUMNS = 512, 32  # as in gradient/channels.cuh
BLOCKS, MAX_SLICES = 512, 128  # of a large batch; few slices, as every block reads the sums of all of its channels
SUMS_BYTES = 16  # of struct Sums
BUDGET = Budget(registers=64)
SUMS_ORDER = "float64, in threads, then 16 per channel, then slices of the batch"


class Slices(CStruct):
    source, c_name = SOURCE, "Slices"
    _fields_ = (
        ("plane", Divider), ("channels", c_uint32), ("lanes", c_uint32), ("slices", c_uint32), ("count", c_int64),
        ("slice", c_int64),
    )  # fmt: skip


@dataclass(frozen=True)
class Channels:
    """Rows of C channels, `plane` elements each."""

    C: int
    plane: int
    is_nhwc: bool
    dtype: str = "float32"

    @staticmethod
    def of(x: TensorType, is_nhwc: bool) -> Channels:
        return Channels(x.row_shape[0], x.row_size // x.row_shape[0] if x.row_size else 0, is_nhwc, x.dtype)

    def why_not(self) -> str:
        """Why blocks cannot divide them; "" if they can."""
        return "" if self.plane < MAX_ELEMENTS else f"supports rows of fewer than 2^31 elements, got {self.plane:,}"

    @property
    def are_columns(self) -> bool:
        """Whether the channels of an element are adjacent."""
        return self.is_nhwc or self.plane == 1

    @property
    def vector(self) -> int:
        """Elements per load."""
        return 4 if (self.C if self.are_columns else self.plane) % 4 == 0 and self.dtype != "float64" else 1

    @property
    def lanes(self) -> int:
        """Threads of a block that share a row of its columns: tiles of up to MAX_COLUMNS, of one width."""
        vectors = self.C // self.vector
        return -(-vectors // -(-vectors * self.vector // MAX_COLUMNS)) if self.are_columns else 1

    @property
    def tiles(self) -> int:
        """Blocks along the channels."""
        return -(-self.C // (self.vector * self.lanes)) if self.are_columns else self.C

    def slice_at(self, B: int) -> int:
        """Elements per channel and block."""
        count = B * self.plane
        least = THREADS // self.lanes if self.are_columns else THREADS * self.vector  # one load per thread
        slices = min(MAX_SLICES, -(-BLOCKS // self.tiles), -(-count // least))
        return round_up(-(-count // slices), 1 if self.are_columns else 32)

    def slices_at(self, B: int) -> int:
        return -(-B * self.plane // self.slice_at(B))

    def covered(self, B: int) -> str:
        """The template arguments for B rows: how blocks cover them, and the type of their elements."""
        index = index_of(B * self.plane)
        kind = f"Columns<{self.vector}>" if self.are_columns else f"Planes<{index}, {self.vector}>"
        return f"{kind}, {FLOATS[self.dtype]}"

    def struct(self, B: int) -> Struct:
        return Slices.of(
            plane=divider(self.plane), channels=self.C, lanes=self.lanes, slices=self.slices_at(B),
            count=B * self.plane, slice=self.slice_at(B),
        )  # fmt: skip

    def scratch_bytes(self, B: int) -> int:
        """Of the partial sums, at Scratch(0)."""
        return self.C * self.slices_at(B) * SUMS_BYTES

    def config(self, B: int, slices: int | None = None) -> LaunchConfig:
        return LaunchConfig((self.tiles, self.slices_at(B) if slices is None else slices, 1), (THREADS, 1, 1), 0)

    def sums(self, source: Path, B: int, a: Argument, b: Argument = NOTHING, mask: Argument = NOTHING) -> KernelLaunch:
        """channel_sums(a, b, mask, partial, slices) of a .cu file; no b: squares."""
        flags = ", ".join(str(flag).lower() for flag in (b == NOTHING, mask != NOTHING))
        program = Program(source, f"channel_sums<{self.covered(B)}, {flags}>")
        return KernelLaunch(program, self.config(B), (a, b, mask, Scratch(0), self.struct(B)), BUDGET)


def in_layout(claim: Claim, net: Network, is_nhwc: bool) -> Claim:
    """The claim, its values of the batch all in NHWC, or all in ROWS; each of them is read twice."""
    layout = CHANNELS_LAST if is_nhwc else ROWS
    batched = [name for name in claim.nodes if net.types[name].is_batched]
    reads = dict.fromkeys(values_read(net, claim), Use(layout, is_read_often=True))
    return replace(claim, reads=reads, writes=dict.fromkeys(batched[-1:], CHANNELS_LAST) if is_nhwc else {})
