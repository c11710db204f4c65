"""mlp_train_bytes on a GPU: the host's side of mlp_train_bytes.cu. How products with bytes are cut into tiles."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from onchip.kernels.cuda.mlp_packing import round_up
from onchip.kernels.cuda.program import Budget, Program

SOURCE = Path(__file__).parent / "mlp_train_bytes.cu"
PARTS = {"fp32": 3, "tf32": 2, "fp16": 2, "bf16": 1}  # numbers of bf16 that a float is made of
LEAST_BATCH = 512  # rows: below, steps wait for launches, not for data
TILE, BLOCK_K, WARPS, RAW_STAGES = 32, 32, 8, 4  # as mlp_train_bytes.cuh has them
GRADIENT_DOWN, GRADIENT_ACROSS = 2, 4  # warps of a gradient's block
BUDGET = Budget(registers=128, spill_bytes=32)  # of what a loop does not change
DEEP_BUDGET = Budget(registers=168)
_LEAST_SLICE = 4  # stages


@dataclass(frozen=True)
class ByteRows:
    """A first layer of N sums over `terms` bytes a row, times a scale, on `units` multiprocessors whose blocks have
    `fast_bytes` of shared memory."""

    terms: int
    N: int
    scale: float
    precision: str
    units: int
    fast_bytes: int

    @property
    def stride(self) -> int:
        """Bytes from row to row."""
        return round_up(self.terms, 16)

    @property
    def one(self) -> int:
        """The byte that stands for 1."""
        return round(1 / self.scale)

    @property
    def parts(self) -> int:
        return PARTS[self.precision]

    # -- forward -------------------------------------------------------------------------------------------------

    def forward_warps(self, batch: int) -> tuple[int, int, int]:
        """Down, across and deep: small tiles where not every multiprocessor has a large one, and they fit."""
        small, large = (2, 2, 2), (4, 2, 1)
        has_few = _blocks(batch, 4) * _blocks(self.N, 2) < self.units
        return small if has_few and self._forward_shared(small) <= self.fast_bytes else large

    def forward_blocks(self, batch: int) -> int:
        down, across, _ = self.forward_warps(batch)
        return _blocks(batch, down) * _blocks(self.N, across)

    def forward_program(self, batch: int) -> tuple[Program, Budget, int]:
        """The kernel, what it may use a thread, and its shared memory in bytes."""
        warps = self.forward_warps(batch)
        down, across, deep = warps
        program = Program(SOURCE, f"bytes_forward<{self.parts}, {down}, {across}>")
        return program, BUDGET if deep == 1 else DEEP_BUDGET, self._forward_shared(warps)

    def _forward_shared(self, warps: tuple[int, int, int]) -> int:
        down, across, deep = warps
        raw = TILE * down * BLOCK_K * deep + TILE * across * (4 * BLOCK_K * deep + 16)
        made = 2 * BLOCK_K * deep * TILE * (down + across * self.parts)
        return RAW_STAGES * raw + 2 * made

    # -- gradients -----------------------------------------------------------------------------------------------

    @property
    def gradient_tiles(self) -> int:
        return _blocks(self.N, GRADIENT_DOWN) * _blocks(self.terms, GRADIENT_ACROSS)

    def slice_stages(self, batch: int) -> int:
        """Stages of 32 rows that a slice has: two blocks for every multiprocessor, if there is work for them."""
        stages = -(-batch // BLOCK_K)
        wanted = max(1, min(2 * self.units // self.gradient_tiles, stages // _LEAST_SLICE))
        return -(-stages // wanted)

    def slices(self, batch: int) -> int:
        return -(-batch // (BLOCK_K * self.slice_stages(batch)))

    def gradient_program(self) -> tuple[Program, Budget, int]:
        """As forward_program."""
        down, across = TILE * GRADIENT_DOWN, TILE * GRADIENT_ACROSS
        raw, made = BLOCK_K * (across + 32 + 4 * down + 32), 2 * BLOCK_K * (across + down * self.parts)
        return Program(SOURCE, f"bytes_gradient<{self.parts}>"), BUDGET, RAW_STAGES * raw + 2 * made


def _blocks(numbers: int, warps: int) -> int:
    return -(-numbers // (TILE * warps))
