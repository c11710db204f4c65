"""Host side of conv/last_layer/sm90.cu: convolution to few output channels on Hopper."""

from __future__ import annotations

import math
from collections.abc import Iterator
from ctypes import c_int32, c_uint32
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from onchip.kernels.cuda.common.activation import act_name, activation_words
from onchip.kernels.cuda.common.arguments import Argument, Input, Output, TensorMap, UInt32, Weight
from onchip.kernels.cuda.common.c_struct import CStruct
from onchip.kernels.cuda.common.dtypes import ELEMENT_TYPES
from onchip.kernels.cuda.common.fast_divide import Divider, divider
from onchip.kernels.cuda.common.precision import PRECISIONS, order_of, round_up
from onchip.kernels.cuda.common.program import Budget, Instance, KernelLaunch, LaunchConfig, Program, Steps
from onchip.kernels.cuda.common.weights import multiplied_weight
from onchip.kernels.cuda.conv.direct import Geometry, bias_recipe, geometry_of
from onchip.kernels.cuda.conv.fusion import TAPS, ConvLowering
from onchip.kernels.cuda.conv.last_layer.cells import CellAxis, Table, cell_axis, cell_weights
from onchip.kernels.cuda.conv.last_layer.match import LastLayerKernel, find_last_layers
from onchip.kernels.cuda.conv.warp_mma import COLUMNS
from onchip.kernels.cuda.mma.wgmma_tile import ARCHITECTURES, PART
from onchip.network.graph import Network, Node
from onchip.network.layers import Elementwise, Tanh
from onchip.network.recipe import Array, Recipe, rearranging_op
from onchip.network.types import DTYPE_BYTES
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Job, Refusal

SOURCE = Path(__file__).with_suffix(".cu")
Y_TYPES = ELEMENT_TYPES | {"uint8": "unsigned char"}
GROUPS = (1, 2, 3, 4, 6)  # supported tiles of 8 columns per wgmma
WARPGROUPS, WARPGROUP, ROWS = 6, 128, 64  # consumer warpgroups per block; threads of one, and cells of its tile
LINE, STEP_BYTES = 128, 32  # bytes of channels per chunk, and per step of k
CHUNK = LINE // 2  # 16-bit channels per chunk
STEPS = LINE // STEP_BYTES
MAX_CELL_HEIGHT = 8
MAX_STAGES, MAX_BOX = 8, 256  # MAX_BOX: per dimension of a TMA box
BLOCK_BYTES = 2 << 10  # shared memory not counted below: tables, mbarriers, alignment to 1,024 B
Pair = tuple[int, int]


class AxisStruct(CStruct):
    source, c_name = SOURCE, "Axis"
    _fields_ = (
        ("side_out", c_int32), ("cell", c_int32), ("step", c_int32), ("first", c_int32), ("taps", c_int32),
        ("dilation", c_int32), ("cells", c_int32), ("warp_cells", c_int32), ("by_tiles", Divider),
        ("by_patches", Divider),
    )  # fmt: skip


class LayerStruct(CStruct):
    source, c_name = SOURCE, "Layer"
    _fields_ = (
        ("N", c_int32), ("chunks", c_int32), ("steps", c_int32), ("columns", c_int32), ("pitch", c_int32),
        ("patch_bytes", c_int32), ("stages", c_int32), ("is_nhwc", c_uint32), ("unit", c_int32), ("stores", c_int32),
        ("h", AxisStruct), ("w", AxisStruct), ("by_units", Divider), ("by_lines", Divider),
    )  # fmt: skip


@dataclass(frozen=True)
class ConvLastLayerSm90Lowering(ConvLowering):
    fast_bytes: int
    is_nhwc: bool = False  # whether y is NHWC
    cell_height: int = 1  # in positions of y; transposed: in pixels of x
    is_row: bool = False  # whether a tile is 64 cells of a row, else 8 x 8

    @property
    def axes(self) -> tuple[CellAxis, CellAxis]:
        return cell_axis(self.geometry, 0, self.cell_height), cell_axis(self.geometry, 1, 1)

    @property
    def tile(self) -> Pair:
        """Rows of cells, and cells per row, of a warpgroup's tile."""
        return (1, ROWS) if self.is_row else (8, ROWS // 8)

    @property
    def warp_tile(self) -> Pair:
        """The same for a warp's quarter of it."""
        return (1, 16) if self.is_row else (2, 8)

    @property
    def tiles(self) -> Pair:
        """Tiles per image."""
        (down, right), (h, w) = self.axes, self.tile
        return math.ceil(down.cells / h), math.ceil(right.cells / w)

    @property
    def columns(self) -> int:
        down, right = self.axes
        return down.cell * right.cell * self.geometry.N

    @property
    def group(self) -> int:
        """Tiles of 8 columns; 0 if there are more columns than any wgmma here has."""
        return next((group for group in GROUPS if group * COLUMNS >= self.columns), 0)

    @property
    def chunks(self) -> int:
        return math.ceil(self.geometry.C / CHUNK)

    @property
    def last_steps(self) -> int:
        """Steps of k in a tap's last chunk of channels."""
        return math.ceil((self.geometry.C - (self.chunks - 1) * CHUNK) / (STEP_BYTES // 2))

    @property
    def taps(self) -> int:
        down, right = self.axes
        return down.taps * right.taps

    @property
    def weight_bytes(self) -> int:
        return round_up(self.taps * self.chunks * self.group * COLUMNS * LINE, 1024)

    @property
    def y_bytes(self) -> int:
        """Shared memory for the warps' tiles of y and the list of stores."""
        return WARPGROUPS * 4 * self.warp_tile_bytes + 8 * self.stores

    @property
    def warp_tile_bytes(self) -> int:
        """Bytes of a warp's tile of y."""
        return 16 * self.columns * DTYPE_BYTES[self.dtypes[1]]

    @property
    def stores(self) -> int:
        """Stores per warp tile, padded to even: what follows the list is then 16 B aligned."""
        return round_up(self.warp_tile_bytes // self.unit, 2)

    def pixels(self, patch: Pair) -> Pair:
        """Rows and columns of a patch of so many tiles."""
        (down, right), (h, w) = self.axes, self.tile
        return down.pixels(patch[0] * h), right.pixels(patch[1] * w)

    def chunk_bytes(self, patch: Pair) -> int:
        """Bytes of a patch per chunk of channels."""
        return round_up(math.prod(self.pixels(patch)) * LINE, 1024)

    def stages(self, patch: Pair) -> int:
        """Patches that fit in shared memory."""
        capacity = self.fast_bytes - BLOCK_BYTES - self.weight_bytes - self.y_bytes
        return min(MAX_STAGES, max(0, capacity) // (self.chunks * self.chunk_bytes(patch)))

    def shared_bytes(self, patch: Pair) -> int:
        patches = self.stages(patch) * self.chunks * self.chunk_bytes(patch)
        return 1024 + self.weight_bytes + patches + round_up(self.y_bytes, 16)

    def with_best_cells(self) -> ConvLastLayerSm90Lowering | None:
        """The same with the cells and tiles of fewest clocks, whatever B; None if none fit."""
        tried = [
            replace(self, cell_height=height, is_row=is_row)
            for height, is_row in product(range(1, MAX_CELL_HEIGHT + 1), (False, True))
            if self._allows(height)
        ]
        fitting = [each for each in tried if each.group and each._patches()]
        return min(fitting, key=lambda each: each._clocks(each.patch(1 << 20)), default=None)

    def _allows(self, cell_height: int) -> bool:
        g = self.geometry
        positions = cell_height * g.stride[0] if g.is_transposed else cell_height
        return cell_height == 1 or (positions < 2 * g.sides_out[0] and g.dilation[0] == 1)

    def _patches(self) -> list[Pair]:
        """Patch sizes of which at least two fit."""
        h, w = self.tiles
        sizes = product(range(1, min(h, WARPGROUPS) + 1), range(1, min(w, WARPGROUPS) + 1))
        return [
            patch for patch in sizes
            if math.prod(patch) <= WARPGROUPS and max(self.pixels(patch)) <= MAX_BOX and self.stages(patch) >= 2
        ]  # fmt: skip

    def _clocks(self, patch: Pair) -> float:
        """Clocks of an SM per image with these patches."""
        costs = self.costs.last_layer_sm90
        step = max(costs.rows_clocks + costs.weights_clocks * self.group, costs.wgmma_clocks * self.group)
        steps = self.taps * ((self.chunks - 1) * STEPS + self.last_steps)
        issued = costs.tile_instructions + costs.step_instructions * steps + costs.group_instructions * self.group
        tile = max(steps * step, issued) + costs.epilogue_clocks * self.group
        pixels = self.chunks * self.chunk_bytes(patch) / costs.bytes_per_clock
        ready = (self.stages(patch) - 1) * math.prod(patch)
        stall = max(1.0, costs.busy_tiles / ready)
        return self._count(patch) * (math.prod(patch) * tile * stall + pixels)

    def _count(self, patch: Pair) -> int:
        """Patches per image."""
        return math.prod(math.ceil(n / size) for n, size in zip(self.tiles, patch, strict=True))

    def patch(self, B: int) -> Pair:
        """Tiles per patch: the fewest clocks, but if possible no fewer patches than SMs."""
        return min(self._patches(), key=lambda patch: (-min(self.units, B * self._count(patch)), self._clocks(patch)))

    def why_not(self) -> str:
        """Reason for a refusal that no choice of cells avoids."""
        g, (x_dtype, _) = self.geometry, self.dtypes
        if x_dtype != PRECISIONS[self.precision].dtype or DTYPE_BYTES[x_dtype] != 2:
            return f"multiplies 16-bit elements, not {x_dtype} in {self.precision}"
        if g.C * 2 % 16:
            return f"TMA needs channels in multiples of 16 B, got {g.C} in {x_dtype}"
        if not g.is_transposed and g.stride[1] > 1:
            return f"needs stride 1 along W, got {g.stride[1]}"
        if g.reach >= 1 << 30:
            return "convolves images of less than 2^30 elements, padding included"
        return ""

    def rate(self, B: int) -> float:
        """Share of the sustained rate: useful wgmma clocks among all clocks of an SM."""
        g, patch, costs = self.geometry, self.patch(max(1, B)), self.costs.last_layer_sm90
        fmas = math.prod(g.sides_in if g.is_transposed else g.sides_out) * g.C * math.prod(g.taps) * g.N
        useful = costs.steady_clocks * fmas / (ROWS * COLUMNS * (STEP_BYTES // 2))
        busy = min(1.0, B * self._count(patch) / self.units)
        clocks = B * self._clocks(patch) / (self.units * busy)
        return min(1.0, useful / self._clocks(patch)) * busy * clocks / (clocks + costs.launch_clocks)

    def at(self, B: int) -> Steps:
        return Steps((self.launch(B),) if B else ())

    @property
    def unit(self) -> int:
        """Bytes per store of y: 16 or 4 if a tile's rows are multiples, else one element."""
        size, per_position = DTYPE_BYTES[self.dtypes[1]], self.geometry.N if self.is_nhwc else 1
        run = size * per_position * math.gcd(self.geometry.sides_out[1], self.warp_tile[1] * self.axes[1].cell)
        return next((unit for unit in (16, 4) if run % unit == 0), size)

    def launch(self, B: int) -> KernelLaunch:
        """conv_last_layer_sm90(x, w, bias, y, patches, layer, activation code and parameters)"""
        g, patch, (x_dtype, y_dtype) = self.geometry, self.patch(B), self.dtypes
        (lines, columns), unit, axes = self.pixels(patch), self.unit, self.axes
        per_axis = zip(axes, self.tile, self.warp_tile, patch, self.tiles, strict=True)
        h, w = (
            AxisStruct.of(
                side_out=axis.side_out, cell=axis.cell, step=axis.step, first=axis.first, taps=axis.taps,
                dilation=axis.dilation, cells=cells, warp_cells=warp_cells, by_tiles=divider(count),
                by_patches=divider(math.ceil(tiles / count)),
            )
            for axis, cells, warp_cells, count, tiles in per_axis
        )  # fmt: skip
        positions = self.warp_tile[1] * axes[1].cell * (g.N if self.is_nhwc else 1)
        layer = LayerStruct.of(
            N=g.N, chunks=self.chunks, steps=self.last_steps, columns=columns,
            pitch=LINE * (8 if self.is_row else axes[0].step * columns), patch_bytes=self.chunk_bytes(patch),
            stages=self.stages(patch), is_nhwc=self.is_nhwc, unit=unit, stores=self.stores, h=h, w=w,
            by_units=divider(positions * DTYPE_BYTES[y_dtype] // unit),
            by_lines=divider(self.warp_tile[0] * axes[0].cell),
        )  # fmt: skip
        rows = self.taps * self.chunks * self.group * COLUMNS
        arguments: tuple[Argument, ...] = (
            TensorMap(Input(0), x_dtype, (g.C, g.sides_in[1], g.sides_in[0], B), (CHUNK, columns, lines, 1), LINE),
            TensorMap(Weight("weight"), x_dtype, (CHUNK, rows), (CHUNK, self.group * COLUMNS), LINE),
            self.bias, Output(0), UInt32(B * self._count(patch)), layer,
            *map(UInt32, activation_words(self.activation)),
        )  # fmt: skip
        threads = WARPGROUPS * WARPGROUP + 32
        config = LaunchConfig(
            (min(self.units, B * self._count(patch)), 1, 1), (threads, 1, 1), self.shared_bytes(patch), overlaps=True
        )
        types = PRECISIONS[self.precision].name, Y_TYPES[y_dtype]
        template = (*types, str(self.group), str(WARPGROUPS), act_name(self.activation))
        # A scheduler has one warp of each warpgroup, and the producer.
        budget = Budget(512 // (WARPGROUPS + 1) // 8 * 8)
        return KernelLaunch(Program(SOURCE, f"conv_last_layer_sm90<{', '.join(template)}>"), config, arguments, budget)


class ConvLastLayerSm90Kernel(LastLayerKernel):
    name = "conv_last_layer_sm90"
    precisions = ("fp16", "bf16")
    architectures = ARCHITECTURES

    def offers(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim | Refusal]:
        for run, is_nhwc in find_last_layers(net, start):
            lowering = ConvLastLayerSm90Lowering.of(
                net, run, geometry_of(net, run.conv), device, job, fast_bytes=device.fast_bytes, is_nhwc=is_nhwc
            )
            why, best = lowering.why_not(), None
            if not why and (best := lowering.with_best_cells()) is None:
                why = f"weights and two patches of pixels take more than {device.fast_bytes:,} B of shared memory"
            if best is None:
                yield Refusal(self.name, run.conv.name, why)
                return
            recipes = _recipes(net, run.conv, best)
            yield self.claim_last(
                net, run, is_nhwc, best, recipes=recipes,
                cost=run.cost(net, job.precision, recipes, best.rate(job.batch), 0.0),
                why="tensor cores, windows read from a patch in shared memory: few channels",
                order=order_of(job.precision, "wgmma", PART, TAPS), fast_bytes=best.shared_bytes(best.patch(job.batch)),
            )  # fmt: skip


def _recipes(net: Network, node: Node, lowering: ConvLastLayerSm90Lowering) -> dict[str, Recipe]:
    name, (down, right) = node.weights["weight"], lowering.axes
    columns = lowering.group * COLUMNS
    shape = lowering.taps * lowering.chunks * columns, CHUNK
    arranged = Recipe.of(
        cell_rows, (name,), shape, net.weight_type(name).dtype, columns=columns, down=down.table, right=right.table,
        channel_axis=0 if lowering.geometry.is_transposed else 1,
    )  # fmt: skip
    return {"weight": multiplied_weight(arranged, shape, lowering.precision), **bias_recipe(net, node)}


@rearranging_op
def cell_rows(weight: Array, columns: int, down: Table, right: Table, channel_axis: int) -> Array:
    """A cell's weights (cell_weights) as (taps * chunks of channels * columns, 64 channels)."""
    channels = round_up(weight.shape[channel_axis], CHUNK)
    full = cell_weights(weight, channels, columns, down, right, channel_axis)
    return full.reshape(-1, CHUNK, columns).swapaxes(1, 2).reshape(-1, CHUNK)


_UPSAMPLE = Geometry(True, 64, 3, 1, (32, 32), (64, 64), (5, 5), (2, 2), (1, 1), (1, 1))
_SAME = Geometry(False, 64, 3, 1, (32, 32), (32, 32), (3, 3), (1, 1), (1, 1), (1, 1))


def _instance(
    name: str, precision: str, y_dtype: str, geometry: Geometry, activation: Elementwise | None = None
) -> Instance:
    def launch(device: Device) -> KernelLaunch:
        x_dtype = PRECISIONS[precision].dtype
        lowering = ConvLastLayerSm90Lowering(
            geometry, precision, (x_dtype, y_dtype), activation, True, device.units, device.fast_bytes
        ).with_best_cells()  # fmt: skip
        assert lowering is not None
        return lowering.launch(1024)

    return Instance(name, launch)


INSTANCES = (
    _instance("64 channels fp16, 5x5, stride 2, Tanh", "fp16", "float16", _UPSAMPLE, Tanh()),
    _instance("64 channels fp16, 5x5, stride 2, to pixels", "fp16", "uint8", _UPSAMPLE, Tanh()),
    _instance("64 channels bf16, 5x5, stride 2, to float32", "bf16", "float32", _UPSAMPLE),
    _instance("64 channels fp16, 3x3", "fp16", "float16", _SAME),
    _instance("64 channels bf16 to 1, 3x3", "bf16", "bfloat16", replace(_SAME, N=1)),
    _instance("64 channels fp16 to 12, 4x4, stride 2", "fp16", "float16", replace(_UPSAMPLE, N=12, taps=(4, 4))),
)
