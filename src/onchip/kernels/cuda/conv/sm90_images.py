"""Host side of conv/sm90_images.cu: the 16-bit variant of conv_sm90 for many images."""

from __future__ import annotations

import math
from ctypes import c_int16, c_uint16, c_uint32
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from onchip.kernels.cuda.common.activation import activation_words
from onchip.kernels.cuda.common.arguments import NOTHING, Argument, Input, Memory, Struct, TensorMap, UInt32
from onchip.kernels.cuda.common.c_struct import CStruct
from onchip.kernels.cuda.common.costs import ConvSm90Costs
from onchip.kernels.cuda.common.precision import PRECISIONS
from onchip.kernels.cuda.common.program import Budget, Instance, KernelLaunch, LaunchConfig, Program
from onchip.kernels.cuda.conv.direct import Geometry, Pair, by_axis
from onchip.kernels.cuda.conv.last_layer.cells import NO_TAP, CellAxis, cell_axis
from onchip.kernels.cuda.mma.wgmma_tile import ALIGN_BYTES, LINE, WARPGROUP
from onchip.network.layers import Elementwise

SOURCE = Path(__file__).with_suffix(".cu")
ARCHITECTURES = ("sm_90a",)
IMAGES, UNIT, UNITS, WARPGROUPS, DEPTH, OUT_IMAGES = 128, 64, 4, 2, 64, 64  # same as in the .cu file
MAX_STEPS, SKIPPED = 100, 0xFFFF
STAGE_BYTES, OUT_BYTES = (IMAGES + UNITS * UNIT) * LINE, OUT_IMAGES * LINE


class StepStruct(CStruct):
    source, c_name = SOURCE, "Step"
    _fields_ = (("down", c_int16), ("right", c_int16), ("taps", c_uint16 * UNITS))


class UnitStruct(CStruct):
    source, c_name = SOURCE, "Unit"
    _fields_ = (("down", c_uint16), ("right", c_uint16), ("n", c_uint32))


class Cells(CStruct):
    source, c_name = SOURCE, "Cells"
    _fields_ = (
        ("chunks", c_uint32), ("channels", c_uint32), ("tiles_n", c_uint32), ("tile_n", c_uint32), ("lines", c_uint32),
        ("columns", c_uint32), ("cell_h", c_uint32), ("cell_w", c_uint32), ("step_h", c_uint32), ("step_w", c_uint32),
        ("lines_in", c_uint32), ("columns_in", c_uint32), ("steps", c_uint32), ("units", UnitStruct * UNITS),
        ("list", StepStruct * MAX_STEPS),
    )  # fmt: skip


@dataclass(frozen=True)
class ImageConv:
    """A convolution whose tiles are the same positions of many images."""

    geometry: Geometry  # without groups
    precision: str
    activation: Elementwise | None
    chunks: int  # slices of k per tap
    channels: int  # of the weight, per tap
    tap_order: tuple[int, ...]  # taps in the order of the weight
    cell_size: Pair  # in positions of y; transposed: in pixels of x
    has_residual: bool = False

    @property
    def axes(self) -> tuple[CellAxis, CellAxis]:
        return cell_axis(self.geometry, 0, self.cell_size[0]), cell_axis(self.geometry, 1, self.cell_size[1])

    @property
    def positions(self) -> int:
        """Positions per cell."""
        return math.prod(axis.cell for axis in self.axes)

    @property
    def tile_n(self) -> int:
        """Channels per tile."""
        return UNIT * (UNITS // self.positions)

    @property
    def tiles_n(self) -> int:
        return math.ceil(self.geometry.N / self.tile_n)

    @cached_property
    def units(self) -> list[tuple[int, int, int]]:
        """Position in the cell and first channel of each unit. The first warpgroup has the two that finish last."""
        down, right = self.axes
        found = [(h, w, n) for h in range(down.cell) for w in range(right.cell) for n in range(0, self.tile_n, UNIT)]
        return sorted(found, key=lambda unit: (_last(down.table[unit[0]]), _last(right.table[unit[1]])), reverse=True)

    @cached_property
    def steps(self) -> list[tuple[int, int, list[int]]]:
        """Pixels under a cell, row by row: offset (down, right) from its first, and the tap for each unit."""
        down, right = self.axes
        index_of = {tap: position for position, tap in enumerate(self.tap_order)}
        found = []
        for i in range(down.taps):
            for j in range(right.taps):
                pairs = [(down.table[h][i], right.table[w][j]) for h, w, _ in self.units]
                taps = [
                    SKIPPED if NO_TAP in pair else index_of[pair[0] * self.geometry.taps[1] + pair[1]] for pair in pairs
                ]
                if min(taps) < SKIPPED:
                    found.append((down.first + i * down.dilation, right.first + j * right.dilation, taps))
        return found

    def _inside(self) -> list[tuple[int, int]]:
        """Per step: the cells of an image in which its pixel is in bounds, and the units whose windows it is in."""
        down, right = self.axes
        return [(_count(down, h) * _count(right, w), sum(tap != SKIPPED for tap in taps)) for h, w, taps in self.steps]

    @property
    def row_flop(self) -> int:
        """Flop per image, without taps in the padding."""
        return 2 * self.geometry.C * self.geometry.N * math.prod(map(_taps_inside, self.axes))

    def clocks(self, B: int, units: int, costs: ConvSm90Costs) -> float:
        """Clocks of an SM for B images."""
        inside = self._inside()
        wgmma_clocks = sum(cells * reached for cells, reached in inside) * self.chunks * costs.unit_clocks
        moved_bytes = sum(cells * (IMAGES + reached * UNIT) * LINE for cells, reached in inside) * self.chunks
        cells = math.prod(axis.cells for axis in self.axes)
        moved_bytes += self.has_residual * cells * IMAGES * UNITS * LINE
        group_clocks = max(wgmma_clocks, moved_bytes / costs.l2_bytes_per_clock)  # all cells of IMAGES images
        group_clocks += cells * costs.tile_clocks
        return group_clocks / cells * math.ceil(self.tiles(B) / units)

    def tiles(self, B: int) -> int:
        return math.ceil(B / IMAGES) * math.prod(axis.cells for axis in self.axes) * self.tiles_n

    def _cells(self) -> Struct:
        (H, W), (down, right) = self.geometry.sides_in, self.axes
        return Cells.of(
            chunks=self.chunks, channels=self.channels, tiles_n=self.tiles_n, tile_n=self.tile_n, lines=down.cells,
            columns=right.cells, **by_axis(cell=(down.cell, right.cell), step=(down.step, right.step)),
            lines_in=H, columns_in=W, steps=len(self.steps),
            units=[UnitStruct.of(down=h, right=w, n=n) for h, w, n in self.units],
            list=[StepStruct.of(down=h, right=w, taps=taps) for h, w, taps in self.steps],
        )  # fmt: skip

    @property
    def stages(self) -> int:
        return 3 if self.has_residual else 4

    @property
    def store_buffers(self) -> int:
        """Store buffers of all warpgroups: two each, or one for every tile of the residual."""
        return UNITS * IMAGES // OUT_IMAGES if self.has_residual else 2 * WARPGROUPS

    def launch(
        self, B: int, units: int, x: Memory, w: Memory, bias: Argument, residual: Memory | None, y: Memory
    ) -> KernelLaunch:
        """conv_sm90_images(x, w, y, residual, bias, N, tile_images, tiles, cells, activation)"""
        g, dtype = self.geometry, PRECISIONS[self.precision].dtype
        (H, W), (HO, WO) = g.sides_in, g.sides_out
        tiles, tile_images = self.tiles(B), min(B, IMAGES)
        arguments = (
            TensorMap(x, dtype, (g.C, W, H, B), (DEPTH, 1, 1, tile_images), LINE),
            TensorMap(w, dtype, (len(self.tap_order) * self.channels, g.N), (DEPTH, UNIT), LINE),
            *(TensorMap(at, dtype, (g.N, WO, HO, B), (UNIT, 1, 1, OUT_IMAGES), LINE) for at in (y, residual or y)),
            bias, UInt32(g.N), UInt32(tile_images), UInt32(tiles), self._cells(),
            *map(UInt32, activation_words(self.activation)),
        )  # fmt: skip
        config = LaunchConfig(
            (min(tiles, units), 1, 1), (WARPGROUP * (WARPGROUPS + 1), 1, 1),
            self.stages * STAGE_BYTES + self.store_buffers * OUT_BYTES + ALIGN_BYTES, overlaps=True,
        )  # fmt: skip
        kind = f"{PRECISIONS[self.precision].name}, {self.stages}, {str(self.has_residual).lower()}"
        program = Program(SOURCE, f"conv_sm90_images<{kind}>")
        return KernelLaunch(program, config, arguments, Budget(168))


def _last(table: tuple[int, ...]) -> int:
    """Index of the last pixel of a cell's window that a position reaches."""
    return max(i for i, tap in enumerate(table) if tap != NO_TAP)


def _count(axis: CellAxis, offset: int) -> int:
    """Cells along an axis whose pixel at this offset is in bounds."""
    return sum(0 <= cell * axis.step + offset < axis.side_in for cell in range(axis.cells))


def _taps_inside(axis: CellAxis) -> int:
    """Taps in bounds, summed over the positions of an axis."""
    return sum(
        tap != NO_TAP and 0 <= position // axis.cell * axis.step + axis.first + i * axis.dilation < axis.side_in
        for position in range(axis.side_out)
        for i, tap in enumerate(axis.table[position % axis.cell])
    )


def image_conv(
    geometry: Geometry, precision: str, activation: Elementwise | None, chunks: int, channels: int,
    tap_order: tuple[int, ...], has_residual: bool, costs: ConvSm90Costs,
) -> ImageConv | None:  # fmt: skip
    """The variant with the cell shape of least estimated time; None if none applies."""
    found = []
    for cell_size in ((1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (1, 4)):
        conv = ImageConv(geometry, precision, activation, chunks, channels, tap_order, cell_size, has_residual)
        if UNITS % conv.positions == 0 and 0 < len(conv.steps) <= MAX_STEPS:
            found.append(conv)
    return min(found, key=lambda conv: conv.clocks(1 << 16, 132, costs), default=None)


def _instance(name: str, precision: str, B: int, has_residual: bool = False) -> Instance:
    g = Geometry(True, 128, 64, 1, (16, 16), (32, 32), (5, 5), (2, 2), (1, 1), (1, 1))
    conv = ImageConv(g, precision, None, 2, 128, tuple(range(25)), (1, 1), has_residual)
    residual = Input(1) if has_residual else None
    return Instance(name, lambda device: conv.launch(B, device.units, Input(0), Input(0), NOTHING, residual, Input(0)))


INSTANCES = (
    _instance("upsampling fp16", "fp16", 5248),
    _instance("upsampling bf16", "bf16", 5248),
    _instance("few images fp16", "fp16", 100),
    _instance("few images bf16", "bf16", 100),
    _instance("a residual fp16", "fp16", 5248, has_residual=True),
    _instance("a residual bf16", "bf16", 5248, has_residual=True),
)
