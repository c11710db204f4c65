"""Tiles of a wgmma GEMM and what they cost: the host side of mma/wgmma_tile.cuh."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from onchip.kernels.cuda.common.arguments import Memory, TensorMap
from onchip.kernels.cuda.common.costs import H200, WgmmaTileCosts
from onchip.kernels.cuda.common.dtypes import ELEMENT_TYPES
from onchip.kernels.cuda.common.gemm import Gemm
from onchip.kernels.cuda.common.precision import PRECISIONS
from onchip.kernels.cuda.common.program import Budget, LaunchConfig
from onchip.network.types import DTYPE_BYTES

ARCHITECTURES = ("sm_90a",)
WARPGROUP, ROWS, LINE, PART = 128, 64, 128, 32  # as in mma/wgmma_tile.cuh
ALIGN_BYTES = 1024  # of a stage: the TMA swizzle needs it
SHARED_BYTES = 220 << 10  # for pipeline stages; biases and mbarriers take the rest of a block's limit
MAX_STAGES = 16
MIN_WEIGHTS = 1 << 15  # per layer: fewer stay in shared memory (mlp/tensor_core.py)
TMA_BYTES = 16  # alignment of rows that TMA requires


@dataclass(frozen=True)
class Tile:
    """The tile of y that a block computes."""

    BN: int
    warpgroups: int  # consumer warpgroups
    warpgroup_rows: int = ROWS  # rows per warpgroup; more than ROWS: a transposed tile (swapped wgmma operands)

    @property
    def height(self) -> int:
        return self.warpgroup_rows * self.warpgroups

    @property
    def is_transposed(self) -> bool:
        return self.warpgroup_rows > ROWS

    def count(self, M: int, N: int) -> int:
        return math.ceil(M / self.height) * math.ceil(N / self.BN)


TILES = Tile(256, 2), Tile(128, 2), Tile(64, 2), Tile(32, 2), Tile(64, 1), Tile(32, 1), Tile(64, 2, 128)
# Most columns of a tile, by accumulators per output; rows that go through registers leave registers for 128 at most.
MAX_COLUMNS = {1: 256, 2: 128, 3: 64}
CLUSTER_TILES = Tile(32, 1), Tile(64, 1), Tile(128, 1)  # split-K; the wide ones for direct x only
MAX_SPLIT_K, MIN_SLICES = 8, 4  # split-K: blocks per tile, slices per block
SPLIT_K_SHARE = 0.95  # split-K must take at most this share of the time without it


def split_has_slices(slices: int, split_k: int) -> bool:
    """Whether the last of the split-K chunks has a slice: all others have slices / split_k, rounded up."""
    return (split_k - 1) * math.ceil(slices / split_k) < slices


@dataclass(frozen=True)
class Tiling:
    """Tile, split-K mode and launch configuration of a GEMM."""

    template: str  # leading template arguments
    split: str  # split-K mode: NONE, SEQUENTIAL, CLUSTER (enum Split of mma/wgmma_tile.cuh)
    tile: Tile
    config: LaunchConfig
    x_tile_rows: int  # rows per TMA tile of x

    @property
    def budget(self) -> Budget:
        blocks = 2 if self.split == "CLUSTER" else 1  # per SM
        return Budget(65536 // (blocks * self.config.block[0]) // 8 * 8, spill_bytes=4)


@dataclass(frozen=True)
class WgmmaGemm(Gemm):
    """A GEMM with w (tf32 splits, N, K): tile, split-K and estimates."""

    split_k: int = 1
    phases: int = 1  # GEMMs of this shape, each with its own slices of w: those of a transposed convolution
    length: int = 0  # row length of x, where w is zero-padded past it; 0: K
    costs: WgmmaTileCosts = field(default=H200.wgmma_tile, kw_only=True, repr=False)

    def count(self, tile: Tile) -> int:
        return self.phases * tile.count(self.M, self.N)

    @property
    def is_direct(self) -> bool:
        """Whether wgmma reads x from shared memory: x has the multiplied type, or TMA rounds it to tf32."""
        return self.precision != "fp32" and self.dtypes[0] == PRECISIONS[self.precision].dtype

    @property
    def x_tma_dtype(self) -> str:
        """The TMA type of x."""
        return "tfloat32" if self.precision == "tf32" else self.dtypes[0]

    @property
    def can_transpose(self) -> bool:
        """Whether transposed tiles are possible: 16-bit y in 16-byte vectors, one accumulator per output."""
        return self.is_direct and self.split_k == 1 and DTYPE_BYTES[self.dtypes[1]] == 2 and self.N % 8 == 0

    def why_not(self) -> str:
        if not self.is_direct and self.dtypes[0] != "float32":
            return f"multiplies {PRECISIONS[self.precision].dtype} or float32, not {self.dtypes[0]}"
        for what, K, dtype in (
            ("x", self.length or self.K, self.dtypes[0]),
            ("w", self.K, PRECISIONS[self.precision].dtype),
        ):
            if not K or K * DTYPE_BYTES[dtype] % TMA_BYTES:
                return f"TMA needs rows of {what} in multiples of {TMA_BYTES} B, got {K} elements"
        return ""

    @property
    def slices(self) -> int:
        return math.ceil(self.K * DTYPE_BYTES[PRECISIONS[self.precision].dtype] / LINE)

    def best_split_k(self, units: int) -> int:
        """The split-K factor with the least estimated time; 1: no split."""
        unsplit = replace(self, split_k=1)
        best, min_us = 1, SPLIT_K_SHARE * unsplit.min_us(units)
        split_k = 2
        while split_k <= MAX_SPLIT_K and self.slices >= split_k * MIN_SLICES:
            split = replace(self, split_k=split_k)
            if split_has_slices(self.slices, split_k) and split.choose_tile(units)[1] == "CLUSTER":
                us = split.min_us(units)
                best, min_us = (split_k, us) if us < min_us else (best, min_us)
            split_k *= 2
        return best

    @property
    def _cluster_tiles(self) -> tuple[Tile, ...]:
        return CLUSTER_TILES if self.is_direct else CLUSTER_TILES[:1]

    def choose_tile(self, units: int) -> tuple[Tile, str]:
        """The tile with the least estimated cost, and the split-K mode."""
        if self.split_k > 1:
            for tile in self._cluster_tiles:
                # Two blocks per SM fit with the narrowest tile; larger clusters would wait for each other.
                most = 2 * units if self.split_k == 2 and tile is self._cluster_tiles[0] else units
                if self.split_k * self.count(tile) <= most:
                    return tile, "CLUSTER"
        sums = PRECISIONS[self.precision].splits + (self.split_k > 1)  # accumulators per output
        most = MAX_COLUMNS[sums] if self.is_direct else min(MAX_COLUMNS[sums], MAX_COLUMNS[2])
        tiles = [tile for tile in TILES if most >= tile.BN and (self.can_transpose or not tile.is_transposed)]
        return min(tiles, key=lambda tile: self._work(tile, units)), "NONE" if self.split_k == 1 else "SEQUENTIAL"

    @property
    def _overhead(self) -> float:
        """Prologue and epilogue of a tile, as extra elements of y."""
        return self.costs.overhead_fmas[self.precision] * self.phases / self.K

    def _work(self, tile: Tile, units: int) -> float:
        """Relative cost per SM: waves of tiles times the cost of a tile."""
        outputs = tile.height * tile.BN / self.costs.tile_shares[tile.height, tile.BN]
        return math.ceil(self.count(tile) / units) * (outputs + self._overhead)

    def rate(self, units: int, overlaps: bool = False) -> float:
        """Estimated share of the peak rate: counts tile overhang and idle SMs in the last wave.

        overlaps  the first prologue and last epilogue overlap adjacent launches
        """
        tile, split = self.choose_tile(units)
        blocks = self.split_k if split == "CLUSTER" else 1  # per tile
        pace = 1.0 if self.is_direct else self.costs.through_registers_factors[self.precision]
        work = self._work(tile, units) - (self._overhead if overlaps else 0.0)
        return pace * blocks * self.phases * self.M * self.N / (units * work)

    def min_us(self, units: int) -> float:
        """Least time: the slices of a block in sequence, the cluster reduction, the activation, the stores of y."""
        (tile, split), costs = self.choose_tile(units), self.costs
        precision = PRECISIONS[self.precision]
        is_cluster = split == "CLUSTER"
        blocks = self.count(tile) * (self.split_k if is_cluster else 1)
        x_bytes = min(self.M, tile.height) * LINE * DTYPE_BYTES[self.dtypes[0]] // DTYPE_BYTES[precision.dtype]
        slice_bytes = x_bytes + precision.splits * tile.BN * LINE
        slower = 1.0 if self.is_direct else costs.slow_slice_factors[precision.splits]
        slice_us = max(slower * (costs.slice_us + costs.column_us * tile.BN), slice_bytes / costs.bytes_per_us)
        us = costs.block_us * min(1.0, blocks / units)
        if is_cluster:
            us += costs.reduce_column_us * tile.BN + costs.reduce_block_us * self.split_k
            us += math.ceil(self.slices / self.split_k) * slice_us * (costs.shared_sm_factor if blocks > units else 1.0)
        else:
            us += math.ceil(blocks / units) * self.slices * slice_us
        if self.activation is not None and self.activation.flop_each > 2:
            outputs = math.ceil(blocks / units) * tile.height * tile.BN  # outputs per SM
            us += outputs * costs.activation_instructions * self.activation.flop_each / costs.instructions_per_us
        return us + self.phases * self.M * self.N * DTYPE_BYTES[self.dtypes[1]] / costs.stored_bytes_per_us

    def tiling(self, units: int) -> Tiling:
        tile, split = self.choose_tile(units)
        precision = PRECISIONS[self.precision]
        x_tiles = DTYPE_BYTES[self.dtypes[0]] // DTYPE_BYTES[precision.dtype]  # TMA tiles of x per tile of w
        stage_bytes = (x_tiles * tile.height + precision.splits * tile.BN) * LINE
        is_cluster = split == "CLUSTER"
        extra = ALIGN_BYTES + (4 * tile.height * (tile.BN + 8) if is_cluster else 0)  # partial sums of split-K
        extra += tile.height * LINE if tile.is_transposed else 0  # staging buffer of the epilogue
        capacity = SHARED_BYTES // 2 if is_cluster else SHARED_BYTES  # the next kernel's blocks get the rest
        stages = min(MAX_STAGES, (capacity - extra) // stage_bytes)
        x_type, y_type = (ELEMENT_TYPES[dtype] for dtype in self.dtypes)
        tile_sizes = f"{tile.warpgroup_rows}, {tile.BN}, {tile.warpgroups}"
        template = f"{precision.name}, {x_type}, {y_type}, {tile_sizes}, {stages}"
        count = self.count(tile)
        config = LaunchConfig(
            (count * self.split_k if is_cluster else min(units, count), 1, 1),
            (WARPGROUP * (tile.warpgroups + 1), 1, 1),
            stages * stage_bytes + extra, overlaps=True, cluster=self.split_k if is_cluster else 1,
        )  # fmt: skip
        return Tiling(template, split, tile, config, min(self.M, tile.height))

    def weight_map(self, w: Memory, tile: Tile) -> TensorMap:
        """TMA descriptor of w (tf32 splits, N, K)."""
        precision = PRECISIONS[self.precision]
        box = (LINE // DTYPE_BYTES[precision.dtype], tile.BN, 1)
        return TensorMap(w, precision.dtype, (self.K, self.N, precision.splits), box, LINE)
