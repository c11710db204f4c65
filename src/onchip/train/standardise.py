"""Columns and targets of mean 0 and standard deviation 1 while a network is trained, and that folded into its weights.

Rows of very different units train badly, or not at all. The statistics are those of the training rows, in float64; the
network that comes out reads raw rows and returns raw targets, so nobody has to keep a scaler beside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from onchip.errors import InputError
from onchip.files import check_memory
from onchip.kernels.chain import find_chain, why_not_float32
from onchip.kernels.pointwise import TRAINED
from onchip.network.graph import Network, Node
from onchip.network.layers import Add, Linear
from onchip.network.reading import show
from onchip.network.recipe import Array, Weight, materialise

LARGEST, SMALLEST = 1e30, 1e-30  # of a value; of a deviation that is not taken for 0: weights stay normal float32
# Of |mean| / deviation. Folded, float32 rounds W x and W mean before they cancel: an 8-100-3 network was off by 1.2e-7
# times this, of its outputs' deviation. Years (220) are folded; beyond 2^10, off by 1e-4, an Add takes the means off.
FAR = 1024.0
_CHUNK = 1 << 18  # elements that are float64 at a time


@dataclass(frozen=True, eq=False)
class Columns:
    """Mean and standard deviation of each column, (D,) float64; a deviation of 0: the column is constant."""

    mean: Array
    deviation: Array

    @property
    def divisor(self) -> Array:
        """(D,): the deviation; 1 for a constant column."""
        return np.where(self.deviation == 0, 1.0, self.deviation)

    @property
    def factor(self) -> Array:
        """(D,): what a distance from the mean is multiplied by; 0 for a constant column, which says nothing."""
        return np.where(self.deviation == 0, 0.0, 1 / self.divisor)

    def standardise(self, x: Array) -> Array:
        """(n, D) float32 from raw (n, D)."""
        check_memory(4 * x.size, "the standardised rows")
        made, factor = np.empty(x.shape, np.float32), self.factor
        for rows in _chunks(x):
            made[rows] = (x[rows] - self.mean) * factor
        return made


def columns_of(x: Array, names: Sequence[str] = (), what: str = "column") -> Columns:
    """Statistics of raw (n, D), n at least 1; InputError where a value is not finite, or too large.

    names  of the columns, for errors
    """
    n, first = len(x), x[0].astype(np.float64)
    total, squares = np.zeros_like(first), np.zeros_like(first)
    for rows in _chunks(x):
        _check_values(x[rows], rows.start, names, what)
        total += (x[rows] - first).sum(axis=0)  # from the first row on: a constant column has exactly its value
    mean = first + total / n
    for rows in _chunks(x):
        squares += np.square(x[rows] - mean).sum(axis=0)
    deviation = np.sqrt(squares / n)
    return Columns(mean, np.where(deviation < SMALLEST, 0.0, deviation))


def _chunks(x: Array) -> Iterator[slice]:
    step = max(1, _CHUNK // max(1, x.shape[1]))
    return (slice(first, first + step) for first in range(0, len(x), step))


def _check_values(x: Array, first: int, names: Sequence[str], what: str) -> None:
    bad = np.argwhere(~(np.abs(x) <= LARGEST))  # a NaN is not below it either
    if len(bad):
        row, column = bad[0].tolist()
        name = show(names[column]) if names else str(column)
        raise InputError(
            f"{what} {name} cannot be standardised", got=f"{x[row, column]:g} in row {first + row}",
            expected=f"finite numbers of at most {LARGEST:g}", hint="fill it in, or leave the row out",
        )  # fmt: skip


@dataclass(frozen=True, eq=False)
class Standard:
    """How rows and targets are standardised for training; None: they are taken as they are."""

    rows: Columns | None = None
    targets: Columns | None = None
    raw: Network | None = None  # the network that is trained further, for raw rows; None: a new one is trained

    def apply(self, x: Array, y: Array) -> tuple[Array, Array]:
        """Rows (n, D_in) and targets as the network is trained on them."""
        return (
            x if self.rows is None else self.rows.standardise(x),
            y if self.targets is None else self.targets.standardise(y),
        )

    def fold(self, net: Network) -> Network:
        """The trained MLP, whose Linear layers have biases, for raw rows and raw targets: in its first and last Linear.

        Where a mean is far from 0 (see FAR), an Add before the first Linear takes the means off.
        """
        linear, weights, nodes = linear_nodes(net), dict(net.weights), list(net.nodes)
        if self.rows is not None:
            mean, factor, first = self.rows.mean, self.rows.factor, linear[0]
            W = _wide(weights, first.weights["weight"]) * factor
            if self.raw is not None:  # what it knows of a column that is constant here
                W = np.where(factor == 0, _wide(self.raw.weights, linear_nodes(self.raw)[0].weights["weight"]), W)
            if (np.abs(mean) * factor).max() > FAR:
                name = "centre"
                while name in net.types:  # a file may call anything so
                    name += "_"
                weights[f"{name}.constant"] = centre = (-mean).astype(np.float32)
                mean, at = mean + centre, nodes.index(first)
                nodes[at] = Node(first.name, first.layer, (name,), first.weights)
                nodes.insert(at, Node(name, Add(), first.inputs, {"constant": f"{name}.constant"}))
            _put(weights, first, W, _wide(weights, first.weights["bias"]) - _shift(W, mean))
        if self.targets is not None:
            last, deviation = linear[-1], self.targets.divisor
            W, b = (_wide(weights, last.weights[role]) for role in ("weight", "bias"))
            _put(weights, last, W * deviation[:, None], b * deviation + self.targets.mean)
        return net.replace(nodes=nodes, weights=weights)

    def unfold(self) -> Network:
        """The opposite, for a network that is trained further: the raw one for standardised rows and targets."""
        assert self.raw is not None
        net, centre = (self.raw, 0.0) if self.rows is None else without_centre(self.raw)
        linear, weights = linear_nodes(net), dict(net.weights)
        if self.rows is not None:
            W, b = (_wide(weights, linear[0].weights[role]) for role in ("weight", "bias"))
            _put(weights, linear[0], W * self.rows.deviation, b + _shift(W, self.rows.mean + centre))
        if self.targets is not None:
            W, b = (_wide(weights, linear[-1].weights[role]) for role in ("weight", "bias"))
            divisor = self.targets.divisor
            _put(weights, linear[-1], W / divisor[:, None], (b - self.targets.mean) / divisor)
        return net.replace(weights=weights)


def linear_nodes(net: Network) -> list[Node]:
    return [node for node in net.nodes if isinstance(node.layer, Linear)]


def without_centre(net: Network) -> tuple[Network, Array | float]:
    """A network without the Add that `fold` may have put before its first Linear, and what that adds: (D,) or 0."""
    add, rest = net.nodes[0], net.nodes[1:]
    constant = add.weights.get("constant", "")
    is_centre = isinstance(add.layer, Add) and constant and add.inputs == tuple(net.inputs)
    if not (is_centre and net.readers(add.name) == [*rest[:1]] and net.weights[constant].shape == net.input.row_shape):
        return net, 0.0
    first = Node(rest[0].name, rest[0].layer, add.inputs, rest[0].weights)
    weights = {name: weight for name, weight in net.weights.items() if name != constant}
    return net.replace(nodes=(first, *rest[1:]), weights=weights), _wide(net.weights, constant)


def why_not_foldable(net: Network) -> str:
    """ "" if the scales of rows and targets can be folded into an MLP from elsewhere; else the reason."""
    net, _ = without_centre(net)
    chain = find_chain(net, 0, TRAINED)
    if chain is None or len(chain.nodes) < len(net.nodes) or chain.vectors != 1:
        return "it is no MLP"
    if why_not := why_not_float32(net, chain):
        return why_not
    if any(layer.bias is None for layer in (chain.layers[0], chain.layers[-1])):
        return "its first or last layer has no bias"
    return "an activation follows its last layer" if chain.layers[-1].activation is not None else ""


def _wide(weights: Mapping[str, Weight], name: str) -> Array:
    return materialise(name, weights).astype(np.float64)


def _shift(W: Array, mean: Array) -> Array:
    """W mean, by the float32 weights that will multiply. Without BLAS, whose bits depend on the number of threads."""
    return (W.astype(np.float32) * mean).sum(axis=1)  # type: ignore[no-any-return]


def _put(weights: dict[str, Weight], node: Node, W: Array, b: Array) -> None:
    weights |= {node.weights["weight"]: W.astype(np.float32), node.weights["bias"]: b.astype(np.float32)}
