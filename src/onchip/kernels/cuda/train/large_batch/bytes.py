"""Host side of train/large_batch/bytes.cu: tiles of the gemms with uint8 rows."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from onchip.kernels.cuda.common.precision import round_up
from onchip.kernels.cuda.common.program import Budget, Program

SOURCE = Path(__file__).parent / "bytes.cu"
SPLITS = {"fp32": 3, "tf32": 2, "fp16": 2, "bf16": 1}  # bf16 terms per float
MIN_BATCH = 512  # rows; smaller steps are bound by launch latency
ROWS, COLUMNS, STAGE_K = 128, 64, 64  # of a forward block, as in bytes.cu; the last two also of splits
FEATURES, GRADIENT_ROWS = 256, 32  # columns of a dW block, and rows of its stages
SPLIT_BYTES = 2 * STAGE_K * COLUMNS  # per stage
FORWARD_BUDGET = Budget(registers=128)
SPLIT_BUDGET = Budget(registers=64)
_MIN_SLICE = 4  # stages


@dataclass(frozen=True)
class ByteRows:
    """A first layer of N units over `terms` bytes per row, times a scale, on `units` SMs."""

    terms: int
    N: int
    scale: float
    precision: str
    units: int

    @property
    def stride(self) -> int:
        """Row stride in bytes."""
        return round_up(self.terms, 16)

    @property
    def one(self) -> int:
        """The byte whose scaled value is 1."""
        return round(1 / self.scale)

    @property
    def splits(self) -> int:
        return SPLITS[self.precision]

    def stages_of_split(self, K: int) -> int:
        """Stages of a split operand with N columns and reduction K, in all blocks of columns."""
        return -(-self.N // COLUMNS) * -(-K // STAGE_K)

    def bytes_of_parts(self, K: int) -> int:
        return self.stages_of_split(K) * self.splits * SPLIT_BYTES

    def split_program(self, is_k_major: bool) -> Program:
        return Program(SOURCE, f"bytes_split<{self.splits}, {str(is_k_major).lower()}>")

    def forward_blocks(self, batch: int) -> int:
        return -(-batch // ROWS) * -(-self.N // COLUMNS)

    def forward_program(self, activation: int) -> tuple[Program, Budget, int]:
        """Returns the kernel, its register budget, and its shared memory in bytes."""
        stages = 3 if self.splits == 3 else 4
        shared = stages * (ROWS * STAGE_K + self.splits * SPLIT_BYTES)
        return Program(SOURCE, f"bytes_forward<{self.splits}, {activation}>"), FORWARD_BUDGET, shared

    @property
    def gradient_tiles(self) -> int:
        return -(-self.N // COLUMNS) * -(-self.terms // FEATURES)

    def slice_stages(self, batch: int) -> int:
        """Stages of 32 rows per split-K slice, so that all blocks, including the tally's, run in one wave."""
        stages, blocks = -(-batch // GRADIENT_ROWS), self.units * (1 if self.splits == 3 else 2) - 1
        return -(-stages // max(1, min(blocks // self.gradient_tiles, stages // _MIN_SLICE)))

    def slices(self, batch: int) -> int:
        return -(-batch // (GRADIENT_ROWS * self.slice_stages(batch)))

    def gradient_program(self) -> tuple[Program, Budget, int]:
        """As forward_program."""
        shared = 4 * (GRADIENT_ROWS * (FEATURES + 16) + self.splits * SPLIT_BYTES // 2)
        budget = Budget(registers=232 if self.splits == 3 else 128)
        return Program(SOURCE, f"bytes_gradient<{self.splits}>"), budget, shared
