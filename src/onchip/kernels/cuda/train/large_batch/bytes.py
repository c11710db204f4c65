"""Host side of train/large_batch/bytes.cu: how products with bytes are cut into tiles."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from onchip.kernels.cuda.common.precision import round_up
from onchip.kernels.cuda.common.program import Budget, Program

SOURCE = Path(__file__).parent / "bytes.cu"
PARTS = {"fp32": 3, "tf32": 2, "fp16": 2, "bf16": 1}  # numbers of bf16 that a float is made of
LEAST_BATCH = 512  # rows: below, steps wait for launches, not for data
ROWS, COLUMNS, STAGE_K = (
    128,
    64,
    64,
)  # of a forward block, as train/large_batch/bytes.cu has them; of parts the last two
FEATURES, GRADIENT_ROWS = 256, 32  # columns of a gradient's block, and rows of its stages
PART_BYTES = 2 * STAGE_K * COLUMNS  # of a stage
FORWARD_BUDGET = Budget(registers=128)
PARTS_BUDGET = Budget(registers=64)
_LEAST_SLICE = 4  # stages


@dataclass(frozen=True)
class ByteRows:
    """A first layer of N sums over `terms` bytes a row, times a scale, on `units` multiprocessors."""

    terms: int
    N: int
    scale: float
    precision: str
    units: int

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

    def stages_of_parts(self, K: int) -> int:
        """Stages of the N columns of an operand with K terms a sum, all blocks of columns together."""
        return -(-self.N // COLUMNS) * -(-K // STAGE_K)

    def bytes_of_parts(self, K: int) -> int:
        return self.stages_of_parts(K) * self.parts * PART_BYTES

    def parts_program(self, along: bool) -> Program:
        return Program(SOURCE, f"bytes_parts<{self.parts}, {str(along).lower()}>")

    # -- forward -------------------------------------------------------------------------------------------------

    def forward_blocks(self, batch: int) -> int:
        return -(-batch // ROWS) * -(-self.N // COLUMNS)

    def forward_program(self, activation: int) -> tuple[Program, Budget, int]:
        """The kernel, what it may use a thread, and its shared memory in bytes."""
        stages = 3 if self.parts == 3 else 4
        shared = stages * (ROWS * STAGE_K + self.parts * PART_BYTES)
        return Program(SOURCE, f"bytes_forward<{self.parts}, {activation}>"), FORWARD_BUDGET, shared

    # -- gradients -----------------------------------------------------------------------------------------------

    @property
    def gradient_tiles(self) -> int:
        return -(-self.N // COLUMNS) * -(-self.terms // FEATURES)

    def slice_stages(self, batch: int) -> int:
        """Stages of 32 rows that a slice has: each block, and the one of the tally, at the same time."""
        stages, blocks = -(-batch // GRADIENT_ROWS), self.units * (1 if self.parts == 3 else 2) - 1
        return -(-stages // max(1, min(blocks // self.gradient_tiles, stages // _LEAST_SLICE)))

    def slices(self, batch: int) -> int:
        return -(-batch // (GRADIENT_ROWS * self.slice_stages(batch)))

    def gradient_program(self) -> tuple[Program, Budget, int]:
        """As forward_program."""
        shared = 4 * (GRADIENT_ROWS * (FEATURES + 16) + self.parts * PART_BYTES // 2)
        budget = Budget(registers=232 if self.parts == 3 else 128)
        return Program(SOURCE, f"bytes_gradient<{self.parts}>"), budget, shared
