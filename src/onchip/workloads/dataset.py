"""A data set: rows to train on and rows to test on, each with its class or its numbers."""

from __future__ import annotations

from dataclasses import dataclass

from onchip.network.meaning import Meaning
from onchip.network.recipe import Array


@dataclass(frozen=True, eq=False)
class Dataset:
    """Rows as a network reads them. Classes are (n,) int64, numbers to hit (n, D_out) float32."""

    name: str
    where: str
    side: int | None  # an image is side x side pixels; None: no images
    x_train: Array  # (n, D_in) float32
    y_train: Array
    x_test: Array  # of no row: there is nothing to test on
    y_test: Array
    words: tuple[str, ...] = ()  # what the classes are called; empty: by their numbers
    notes: tuple[str, ...] = ()  # what its user should be told
    columns: tuple[str, ...] = ()  # what the numbers of a row are called; empty: nothing
    scale: float = 0.0  # the rows are bytes divided by this; 0: they are not
    is_table: bool = False  # columns that may have units of their own; else rows are images, series or the like

    @property
    def meaning(self) -> Meaning:
        """Of the rows and results of a network for this data."""
        classes = self.words or tuple(map(str, range(self.outputs)))
        return Meaning(self.columns, classes if self.y_train.ndim == 1 else (), self.scale)

    @property
    def inputs(self) -> int:
        return int(self.x_train.shape[1])

    @property
    def outputs(self) -> int:
        """How many numbers a network for this data gives."""
        if self.y_train.ndim == 2:
            return int(self.y_train.shape[1])
        return len(self.words) or 1 + max(int(y.max()) for y in (self.y_train, self.y_test) if len(y))
