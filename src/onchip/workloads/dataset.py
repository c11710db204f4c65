"""A data set: training and test rows with classes or target values."""

from __future__ import annotations

from dataclasses import dataclass

from onchip.network.meaning import Column, Meaning
from onchip.network.recipe import Array


@dataclass(frozen=True, eq=False)
class Dataset:
    """Rows in the layout that a network reads. Classes are (n,) int64, target values (n, D_out) float32."""

    name: str
    where: str
    side: int | None  # an image is side x side pixels; None: no images
    x_train: Array  # (n, D_in) float32, or integers for a network that reads ids
    y_train: Array
    x_test: Array  # empty: nothing to test on
    y_test: Array
    words: tuple[str, ...] = ()  # class names; empty: classes are named by index
    notes: tuple[str, ...] = ()  # messages for the user
    columns: tuple[str, ...] = ()  # column names; empty: none
    scale: float = 0.0  # the rows are bytes divided by this; 0: they are not bytes
    is_table: bool = False  # columns may have different units; else rows are images, series or similar
    row_shape: tuple[int, ...] = ()  # of a row in its file; (): a list of columns
    table: tuple[Column, ...] = ()  # how rows are encoded from a table; (): as they are

    @property
    def meaning(self) -> Meaning:
        """Column and class names for a network trained on this data."""
        classes = self.words or tuple(map(str, range(self.outputs)))
        return Meaning(self.columns, classes if self.y_train.ndim == 1 else (), self.scale, table=self.table)

    @property
    def inputs(self) -> int:
        return int(self.x_train.shape[1])

    @property
    def outputs(self) -> int:
        """The number of outputs that a network for this data needs."""
        if self.y_train.ndim == 2:
            return int(self.y_train.shape[1])
        return len(self.words) or 1 + max(int(y.max()) for y in (self.y_train, self.y_test) if len(y))
