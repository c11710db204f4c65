"""Standardise columns and targets during training, and fold the scaling into the trained weights.

Columns of very different scales train badly or not at all. The statistics come from the training rows, in float64. The
final network reads raw rows and returns raw targets, so no separate scaler has to be stored.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from onchip.errors import InputError
from onchip.files import check_memory
from onchip.kernels.chain import first_layer
from onchip.network.graph import Network, Node
from onchip.network.layers import Add, Linear, Reshape
from onchip.network.reading import show
from onchip.network.recipe import Array, Weight, materialise, reach

LARGEST, SMALLEST = 1e30, 1e-30  # largest value; deviations below SMALLEST count as 0: weights stay normal float32
# Largest |mean| / deviation that is folded. float32 rounds W x and W mean before they cancel: an 8-100-3 network had
# an error of 1.2e-7 times this ratio, relative to its outputs' deviation. Years (220) are folded. Above 2^10, where the
# error reaches 1e-4, an Add subtracts the means.
FAR = 1024.0
CHUNK = 1 << 18  # elements converted to float64 at a time


@dataclass(frozen=True, eq=False)
class Columns:
    """Mean and standard deviation per column, (D,) float64; the deviation of a constant column is 0."""

    mean: Array
    deviation: Array

    @property
    def divisor(self) -> Array:
        """(D,): the deviation; 1 for a constant column."""
        return np.where(self.deviation == 0, 1.0, self.deviation)

    @property
    def factor(self) -> Array:
        """(D,): 1 / deviation; 0 for a constant column, which carries no information."""
        return np.where(self.deviation == 0, 0.0, 1 / self.divisor)

    def standardise(self, x: Array) -> Array:
        """(n, D) float32 from raw (n, D)."""
        check_memory(4 * x.size, "the standardised rows")
        scaled, factor = np.empty(x.shape, np.float32), self.factor
        for rows in _chunks(x):
            scaled[rows] = (x[rows] - self.mean) * factor
        return scaled


def columns_of(x: Array, names: Sequence[str] = (), what: str = "column") -> Columns:
    """Compute the statistics of raw (n, D), n at least 1; InputError if a value is not finite or too large.

    names  column names, for errors
    """
    n, first = len(x), x[0].astype(np.float64)
    total, squares = np.zeros_like(first), np.zeros_like(first)
    for rows in _chunks(x):
        _check_values(x[rows], rows.start, names, what)
        total += (x[rows] - first).sum(axis=0)  # relative to the first row: the mean of a constant column is exact
    mean = first + total / n
    for rows in _chunks(x):
        squares += np.square(x[rows] - mean).sum(axis=0)
    deviation = np.sqrt(squares / n)
    return Columns(mean, np.where(deviation < SMALLEST, 0.0, deviation))


def _chunks(x: Array) -> Iterator[slice]:
    step = max(1, CHUNK // max(1, x.shape[1]))
    return (slice(first, first + step) for first in range(0, len(x), step))


def _check_values(x: Array, first: int, names: Sequence[str], what: str) -> None:
    bad = np.argwhere(~(np.abs(x) <= LARGEST))  # also true for NaN
    if len(bad):
        row, column = bad[0].tolist()
        name = show(names[column]) if names else str(column)
        raise InputError(
            f"{what} {name} cannot be standardised", got=f"{x[row, column]:g} in row {first + row}",
            expected=f"finite values of at most {LARGEST:g}", hint="replace the value or omit the row",
        )  # fmt: skip


@dataclass(frozen=True, eq=False)
class Standard:
    """The scaling of rows and targets during training; None: unscaled."""

    rows: Columns | None = None
    targets: Columns | None = None
    raw: Network | None = None  # the network to train further, which reads raw rows; None: a new network

    def apply(self, x: Array, y: Array) -> tuple[Array, Array]:
        """Scale rows (n, D_in) and targets for training."""
        return (
            x if self.rows is None else self.rows.standardise(x),
            y if self.targets is None else self.targets.standardise(y),
        )

    def fold(self, net: Network) -> Network:
        """Fold the scaling into the first and last Linear of a trained network, which must have biases.

        The result reads raw rows and returns raw targets. If a mean is far from 0 (see FAR), an Add before the first
        Linear subtracts the means.
        """
        weights, nodes = dict(net.weights), list(net.nodes)
        if self.rows is not None:
            mean, factor, first = self.rows.mean, self.rows.factor, first_linear(net)
            W = _as_float64(weights, first.weights["weight"]) * factor
            if self.raw is not None:  # columns that are constant in these rows keep their trained weights
                W = np.where(factor == 0, _as_float64(self.raw.weights, first_linear(self.raw).weights["weight"]), W)
            if (np.abs(mean) * factor).max() > FAR:
                name = "centre"
                while name in net.types:  # a name in a file may collide
                    name += "_"
                centre = (-mean).astype(np.float32)
                weights[f"{name}.constant"] = centre.reshape(net.input.row_shape)
                head = nodes[0]  # a Reshape may precede the Linear
                mean, nodes[0] = mean + centre, Node(head.name, head.layer, (name,), head.weights)
                nodes.insert(0, Node(name, Add(), head.inputs, {"constant": f"{name}.constant"}))
            _set_linear(weights, first, W, _as_float64(weights, first.weights["bias"]) - _shift(W, mean))
        if self.targets is not None:
            last, deviation = last_linear(net), self.targets.divisor
            W, b = (_as_float64(weights, last.weights[role]) for role in ("weight", "bias"))
            _set_linear(weights, last, W * deviation[:, None], b * deviation + self.targets.mean)
        return net.replace(nodes=nodes, weights=weights)

    def unfold(self) -> Network:
        """The inverse of `fold`, to train a network further: convert `raw` to standardised rows and targets."""
        assert self.raw is not None
        net, centre = (self.raw, 0.0) if self.rows is None else without_centre(self.raw)
        weights = dict(net.weights)
        if self.rows is not None:
            first = first_linear(net)
            W, b = (_as_float64(weights, first.weights[role]) for role in ("weight", "bias"))
            _set_linear(weights, first, W * self.rows.deviation, b + _shift(W, self.rows.mean + centre))
        if self.targets is not None:
            last, divisor = last_linear(net), self.targets.divisor
            W, b = (_as_float64(weights, last.weights[role]) for role in ("weight", "bias"))
            _set_linear(weights, last, W / divisor[:, None], (b - self.targets.mean) / divisor)
        return net.replace(weights=weights)


def first_linear(net: Network) -> Node:
    """The first Linear of a network whose rows can be scaled, also of one that `fold` returned."""
    return next(node for node in net.nodes if isinstance(node.layer, Linear))


def last_linear(net: Network) -> Node:
    """The Linear whose values the network returns, if its targets can be scaled."""
    return _last_nodes(net)[-1]


def _last_nodes(net: Network) -> list[Node]:
    """The node of the output; if that is a Reshape then the one before it, and so on."""
    found = [net.by_name[net.outputs[0]]]
    while isinstance(found[-1].layer, Reshape) and found[-1].inputs[0] in net.by_name:
        found.append(net.by_name[found[-1].inputs[0]])
    return found


def without_centre(net: Network) -> tuple[Network, Array | float]:
    """Remove the Add that `fold` may have inserted before the first Linear; return its constant too, (D,) or 0."""
    add, rest = net.nodes[0], net.nodes[1:]
    constant = add.weights.get("constant", "")
    is_centre = rest and isinstance(add.layer, Add) and constant and add.inputs == tuple(net.inputs)
    if not (is_centre and net.readers(add.name) == [*rest[:1]] and net.weights[constant].shape == net.input.row_shape):
        return net, 0.0
    first = Node(rest[0].name, rest[0].layer, add.inputs, rest[0].weights)
    weights = {name: weight for name, weight in net.weights.items() if name != constant}
    return net.replace(nodes=(first, *rest[1:]), weights=weights), _as_float64(net.weights, constant).reshape(-1)


def why_rows_not_foldable(net: Network) -> str:
    """ "" if the scaling of rows can be folded into this network's first layer; else the reason."""
    net, _ = without_centre(net)
    if net.input.dtype != "float32":
        return f"the rows are {net.input.dtype}"
    at, (name,) = first_layer(net, 0), net.inputs
    if len(net.readers(name)) != 1 or name in net.kept:
        return "several layers read the rows"
    if at is None:
        return f"the first layer is '{net.nodes[0].name}' ({net.nodes[0].layer.kind})"
    return _why_fixed(net, net.nodes[at], net.input.row_size, axis=1)


def why_targets_not_foldable(net: Network) -> str:
    """ "" if the scaling of targets can be folded into this network's last layer; else the reason."""
    nodes = _last_nodes(net)
    last = nodes[-1]
    if not isinstance(last.layer, Linear):
        return f"the last layer is '{last.name}' ({last.layer.kind})"
    # The output has no reader, and each node before it only the next one.
    if any(len(net.readers(node.name)) != (i > 0) for i, node in enumerate(nodes)):
        return f"other layers read the output of '{last.name}'"
    return _why_fixed(net, last, net.output.row_size, axis=0)


def _why_fixed(net: Network, node: Node, size: int, axis: int) -> str:
    """Why a Linear's weights cannot absorb a scaling of its inputs (axis 1) or outputs (axis 0); "" if they can."""
    of_others = reach([w for other in net.nodes if other is not node for w in other.weights.values()], net.weights)
    if net.values_as_weights(node):
        return f"the weights of layer '{node.name}' are computed"
    if net.weights[node.weights["weight"]].shape[axis] != size:
        return f"layer '{node.name}' computes several vectors per row"
    if "bias" not in node.weights:
        return f"layer '{node.name}' has no bias"
    for weight in node.weights.values():
        if net.weight_type(weight).dtype != "float32":
            return f"'{weight}' is {net.weight_type(weight).dtype}"
        if weight in of_others:
            return f"another layer shares '{weight}'"
    return ""


def _as_float64(weights: Mapping[str, Weight], name: str) -> Array:
    return materialise(name, weights).astype(np.float64)


def _shift(W: Array, mean: Array) -> Array:
    """W mean, with the float32 weights used at run time. No BLAS: its bits depend on the number of threads."""
    return (W.astype(np.float32) * mean).sum(axis=1)  # type: ignore[no-any-return]


def _set_linear(weights: dict[str, Weight], node: Node, W: Array, b: Array) -> None:
    weights |= {node.weights["weight"]: W.astype(np.float32), node.weights["bias"]: b.astype(np.float32)}
