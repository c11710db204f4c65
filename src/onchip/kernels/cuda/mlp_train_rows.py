"""mlp_train_rows on a GPU: the host's side of mlp_train_rows.cu. Which layers it takes, and what they need."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from onchip.kernels.cuda.program import Budget, Program

SOURCE = Path(__file__).parent / "mlp_train_rows.cu"
ROWS, PITCH, MOST_WIDTHS = 128, 129, 4  # as mlp_train_rows.cu has them
MOST_WIDTH, MOST_OUTPUTS = 64, 32
MOST_SHARED_BYTES = 75 << 10  # three blocks a multiprocessor: fewer would wait for each step of a row
LEAST_ROWS = 32  # a multiprocessor
BUDGET = Budget(registers=128, spill_bytes=32)


@dataclass(frozen=True)
class RowsPass:
    """Layers behind the first of a network whose layers give `widths` numbers a row."""

    widths: tuple[int, ...]  # of all layers, the first too
    weight_floats: int  # of those behind the first

    @property
    def fits(self) -> bool:
        """Whether the kernel takes them."""
        if not 2 <= len(self.widths) <= MOST_WIDTHS or max(self.widths) > MOST_WIDTH or self.widths[-1] > MOST_OUTPUTS:
            return False
        return self.shared_bytes <= MOST_SHARED_BYTES

    @property
    def shared_bytes(self) -> int:
        return 4 * (self.weight_floats + PITCH * sum(self.widths))

    @property
    def program(self) -> Program:
        return Program(SOURCE, f"train_rows<{', '.join(map(str, self.widths))}>")
