"""Random networks for tests: grown layer by layer, with float64 weights so that no mistake hides in their rounding.

What a network looks like is decided by `pick(options)`: Hypothesis's, which shrinks failures, or a seeded one, which
can be counted.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st

from onchip.kernels import reference
from onchip.network.graph import Network, Node
from onchip.network.layers import (
    BatchNorm1d,
    BatchNorm2d,
    Conv1d,
    Conv2d,
    ConvTranspose1d,
    ConvTranspose2d,
    Embedding,
    Layer,
    Linear,
    Permute,
    Reshape,
    TokenConv,
)
from onchip.network.types import TensorType, numpy_dtype

Pick = Callable[[Sequence[Any]], Any]
YES_NO = (True, False)


def seeded(seed: int) -> Pick:
    return random.Random(seed).choice


class Grow:
    """Builds a network: each method adds a layer that reads a value, and returns the new value's name."""

    def __init__(self, pick: Pick, *row_shape: int, dtype: str = "float64") -> None:
        self.pick = pick
        self.inputs = {"x": TensorType(("B", *row_shape), dtype)}
        self.types = dict(self.inputs)
        self.nodes: list[Node] = []
        self.weights: dict[str, np.ndarray] = {}
        self.weight_dtype = "float64"
        self._rng = np.random.default_rng(pick(range(1000)))

    def add(self, layer: Layer, *values: str, **shapes: tuple[int, ...]) -> str:
        """A layer with random weights of these shapes, by role."""
        name = f"{layer.kind.lower()}{len(self.nodes)}"
        roles = {role: f"{name}.{role}" for role in shapes}
        for role, shape in shapes.items():
            terms = max(1, int(np.prod(shape[1:])))
            if "float" in self.weight_dtype:
                drawn = np.asarray(self._rng.standard_normal(shape) / np.sqrt(terms))
            else:
                drawn = np.asarray(self._rng.integers(0, 4, shape))
            weight = 0.5 + np.abs(drawn) if role == "var" else np.asarray(drawn > 0) if role == "mask" else drawn
            self.weights[roles[role]] = weight.astype(numpy_dtype(self.weight_dtype))
        types = {role: TensorType(shape, self.weight_dtype) for role, shape in shapes.items()}
        self.types[name] = layer.infer(tuple(self.types[value] for value in values), types)
        self.nodes.append(Node(name, layer, values, roles))
        return name

    def row(self, value: str) -> tuple[int, ...]:
        return self.types[value].row_shape

    def linear(self, value: str, D_out: int | None = None) -> str:
        D_out = D_out or self.pick(range(1, 7))
        return self.add(Linear(), value, weight=(D_out, self.row(value)[-1]), **self._maybe("bias", D_out))

    def conv(self, value: str, layer: Conv1d | Conv2d, C_out: int, *kernel: int) -> str:
        """C_out channels a group."""
        shape = (C_out * layer.groups, self.row(value)[0] // layer.groups, *kernel)
        return self.add(layer, value, weight=shape, **self._maybe("bias", shape[0]))

    def transposed(self, value: str, layer: ConvTranspose1d | ConvTranspose2d, C_out: int, *kernel: int) -> str:
        """C_out channels a group."""
        bias = self._maybe("bias", C_out * layer.groups)
        return self.add(layer, value, weight=(self.row(value)[0], C_out, *kernel), **bias)

    def norm(self, value: str) -> str:
        C, rank = self.row(value)[0], len(self.row(value))
        layer = BatchNorm2d(self.pick((1e-5, 0.1))) if rank == 3 else BatchNorm1d(self.pick((1e-5, 0.1)))
        return self.add(layer, value, mean=(C,), var=(C,), **self._maybe("weight", C), **self._maybe("bias", C))

    def embedding(self, value: str, V: int, E: int) -> str:
        return self.add(Embedding(), value, weight=(V, E))

    def network(self, *outputs: str) -> Network:
        return Network(self.inputs, tuple(self.nodes), outputs, self.weights)

    def _maybe(self, role: str, size: int) -> dict[str, tuple[int, ...]]:
        return {role: (size,)} if self.pick(YES_NO) else {}


def random_rows(net: Network, B: int = 3) -> tuple[np.ndarray, ...]:
    """B rows for every input; ids below the smallest table."""
    rng = np.random.default_rng(7)
    tables = (net.weights[n.weights["weight"]] for n in net.nodes if isinstance(n.layer, Embedding | TokenConv))
    V = min((table.shape[0] for table in tables), default=1)
    return tuple(
        rng.standard_normal((B, *given.row_shape)) if "float" in given.dtype
        else rng.integers(0, V, (B, *given.row_shape)).astype(given.dtype)
        for given in net.inputs.values()
    )  # fmt: skip


def assert_same_meaning(before: Network, after: Network, tolerance: float = 1e-12) -> None:
    """Both make the same outputs of the same rows, but for rounding: `tolerance` of the largest number on the way."""
    assert after.inputs == before.inputs
    assert after.outputs == before.outputs
    rows = random_rows(before)
    truth, got = reference.forward_all(before, rows), reference.forward_all(after, rows)
    largest = max([1.0, *(float(np.abs(value).max()) for value in truth.values())])
    for name in before.outputs:
        assert after.types[name] == before.types[name]
        np.testing.assert_allclose(got[name], truth[name], rtol=0, atol=tolerance * largest, err_msg=name)


# -- properties of rewrites ------------------------------------------------------------------------------------

Family = Callable[[Pick], tuple[Network, bool]]  # a random network, and whether the rewrite has something to do there
Step = Callable[[Network], tuple[Network, Sequence[str]]]


def drawn(data: Any) -> Pick:
    """A pick of Hypothesis's, for a test with `data=st.data()`."""
    return lambda options: data.draw(st.sampled_from(options))


def assert_rewrites(step: Step, family: Family, pick: Pick) -> tuple[Network, Network]:
    """The step does something where it should and only there, keeps the meaning, and finds nothing more to do.

    Answers with the network before and after.
    """
    net, fires = family(pick)
    changed, told = step(net)
    assert bool(told) == fires, f"{told}\n{net}"
    if not fires:
        assert changed is net
        return net, net
    assert_same_meaning(net, changed)
    again, told = step(changed)
    assert not told, f"{told}\n{changed}"
    assert again is changed
    return net, changed


def share_that_fires(family: Family, count: int = 200) -> float:
    return sum(family(seeded(seed))[1] for seed in range(count)) / count


def add_moves(grow: Grow, value: str) -> list[str]:
    """Up to three Reshapes and Permutes behind a value."""
    moves: list[str] = []
    for _ in range(grow.pick((1, 2, 3, 3, 3))):
        source = moves[-1] if moves else value
        row = grow.row(source)
        if len(row) > 1 and grow.pick((True, True, False)):
            axes = list(range(1, 1 + len(row)))
            order = [axes.pop(grow.pick(range(len(axes)))) for _ in row]
            moves.append(grow.add(Permute((0, *order)), source))
        else:
            moves.append(grow.add(Reshape(grow.pick(row_shapes(math.prod(row)))), source))
    return moves


def row_shapes(size: int) -> list[tuple[int, ...]]:
    """Every shape of one to three axes that holds `size` numbers."""
    pairs = [(a, size // a) for a in range(1, size + 1) if size % a == 0]
    return [(size,), *pairs, *((a, b, n // b) for a, n in pairs for b in range(1, n + 1) if n % b == 0)]
