"""rowwise: layers without a product, one at a time: activations, softmax over any axis."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from onchip.kernels.chain import in_layouts
from onchip.kernels.cpu.activation import NO_NORMALISER, NORMALISERS, activate, code_of, normalise
from onchip.kernels.cpu.jit import address, compiled
from onchip.kernels.cpu.price import CorePrice
from onchip.kernels.cpu.threads import run_pieces
from onchip.kernels.pointwise import CPU_ACTIVATIONS, IDENTITY
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Job, Refusal
from onchip.spec.layers import Elementwise, Layer, LogSoftmax, Softmax
from onchip.spec.network import Network
from onchip.spec.recipe import Array

_BLOCK_ROWS = 64


@compiled()
def _block(worker: int, piece: int, y: int, B: int, width: int, activation: int, normaliser: int) -> None:
    first = piece * _BLOCK_ROWS
    rows, at = min(_BLOCK_ROWS, B - first), y + first * width * 4
    if normaliser:
        normalise(at, rows, width, width, normaliser)
    else:
        activate(at, rows, width, width, activation)


@compiled()
def _run_rows(y: Array, B: int, width: int, activation: int, normaliser: int, threads: int) -> None:
    """y: B rows of `width` numbers, flat, changed in place."""
    blocks = (B + _BLOCK_ROWS - 1) // _BLOCK_ROWS
    run_pieces(_block, (address(y), B, width, activation, normaliser), blocks, threads)


class Rowwise:
    name = "rowwise"
    device_kind = "cpu"
    precisions = ("fp32",)

    def claims(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim | Refusal]:
        node = net.nodes[start]
        if job.is_training or not isinstance(node.layer, (*CPU_ACTIVATIONS, Softmax, LogSoftmax)):
            return
        x, y = net.types[node.inputs[0]], net.types[node.name]
        if x.dtype != "float32":
            yield Refusal(self.name, node.name, f"computes on float32, got {x.dtype}")
            return
        # A copy from memory to memory, then what is done to it where it lies.
        price = CorePrice(net.row_flop(node), x.row_bytes + y.row_bytes, row_cache_bytes=2 * y.row_bytes)
        claim = Claim(
            self.name, f"rowwise<{node.layer.kind}>", (node.name,), price, "one layer by itself",
            order="in order" if isinstance(node.layer, Softmax | LogSoftmax) else "", facts=node.layer,
        )  # fmt: skip
        yield from in_layouts(net, node, claim) if isinstance(node.layer, Elementwise) else (claim,)

    def bind(self, claim: Claim, weights: dict[str, Array]) -> Callable[[Sequence[Array], Sequence[Array], int], None]:
        layer = claim.facts
        assert isinstance(layer, Layer)

        def run(inputs: Sequence[Array], outputs: Sequence[Array], threads: int) -> None:
            x, y = inputs[0], outputs[0]
            if isinstance(layer, Softmax | LogSoftmax):
                moved = np.array(np.moveaxis(x, layer.axis, -1), order="C")
                width = moved.shape[-1]
                code = NORMALISERS[layer.kind]
                _run_rows(moved.reshape(-1), moved.size // width, width, IDENTITY, code, threads)
                y[...] = np.moveaxis(moved, -1, layer.axis)
                return
            assert isinstance(layer, Elementwise)
            y.reshape(-1)[...] = x.reshape(-1)
            _run_rows(y.reshape(-1), len(y), y.size // len(y), code_of(layer), NO_NORMALISER, threads)

        return run
