"""cast: ids as float32, in one call into compiled code; with a number that is added to them first.

That is how a comparison of ids with a number begins, whose masks stand in front of many small networks.

Floor   Memory: ids in, y out.
Limits  int64 and int32 to float32; other Casts are plain's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from onchip.kernels.cpu.jit import address, address_of, compiled, floats_at, int_at, ints_at, linked, pointer
from onchip.kernels.cpu.late_numba import carray, types
from onchip.kernels.cpu.launches import CompiledLaunch, words
from onchip.kernels.cpu.price import CorePrice
from onchip.kernels.cpu.threads import run_pieces
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Job, Refusal
from onchip.spec.layers import Add, Cast
from onchip.spec.network import Network
from onchip.spec.recipe import Array, Recipe, as_is

_BLOCK = 1 << 13  # numbers that a thread takes at a time
_SIZE, _BYTES, _OFFSET, _WORDS = range(4)  # what `_run` is told: numbers of a row, bytes of an id, what is added


@compiled()
def _block(worker: int, piece: int, x: int, y: int, count: int, told: Array) -> None:
    first, offset = piece * _BLOCK, told[_OFFSET]
    count = min(_BLOCK, count - first)
    made = floats_at(y + first * 4, count)
    if told[_BYTES] == 8:
        wide = ints_at(x + first * 8, count)
        for n in range(count):
            made[n] = np.float32(wide[n] + offset)
    else:
        narrow = carray(pointer(x + first * 4), (count,), np.int32)
        for n in range(count):
            made[n] = np.float32(np.int32(narrow[n] + offset))


@linked(*(types.int64,) * 4)
def _run(facts: int, operands: int, B: int, threads: int) -> None:
    """The code of a CompiledLaunch."""
    told, x, y = ints_at(facts, _WORDS), int_at(operands), int_at(operands + 8)
    pieces = (B * told[_SIZE] + _BLOCK - 1) // _BLOCK
    run_pieces(_block, (x, y, B * told[_SIZE], told), pieces, max(1, min(threads, pieces)))


@dataclass(frozen=True)
class Facts:
    size: int
    bytes: int


class IdsToFloats:
    name = "cast"
    device_kind = "cpu"
    precisions = ("fp32",)

    def claims(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim | Refusal]:
        nodes, recipes = [net.nodes[start]], {}
        x = net.types[nodes[0].inputs[0]]
        if job.is_training or x.dtype not in ("int64", "int32"):
            return
        if isinstance(nodes[0].layer, Add) and list(nodes[0].weights) == ["constant"]:
            name = nodes[0].weights["constant"]
            behind = net.nodes[start + 1] if start + 1 < len(net.nodes) else nodes[0]
            if net.weights[name].shape not in ((), (1,)) or net.readers(nodes[0].name) != [behind]:
                return
            if nodes[0].name in net.output_names or len(nodes[0].inputs) > 1:
                return
            recipes = {"offset": Recipe.of(as_is, (name,), net.weights[name].shape, x.dtype)}
            nodes.append(behind)
        if nodes[-1].layer != Cast("float32"):
            return
        price = CorePrice(x.row_size * len(nodes), x.row_bytes + net.types[nodes[-1].name].row_bytes)
        yield Claim(
            self.name, f"{self.name}<{x.dtype}>", tuple(node.name for node in nodes), price,
            "ids become floats in one pass", recipes, facts=Facts(x.row_size, 8 if x.dtype == "int64" else 4),
        )  # fmt: skip

    def bind(self, claim: Claim, weights: dict[str, Array]) -> CompiledLaunch:
        facts = claim.facts
        assert isinstance(facts, Facts)
        told = words(facts.size, facts.bytes, int(weights["offset"].reshape(())) if weights else 0)
        return CompiledLaunch(address_of(_run), lambda threads: (address(told), told))
