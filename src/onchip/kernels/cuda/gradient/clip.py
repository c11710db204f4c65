"""The scale that clips all gradients: host side of gradient/clip.cu."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from ctypes import c_float, c_int64, c_uint32, c_void_p
from dataclasses import dataclass
from pathlib import Path

from onchip.kernels.cuda.common.arguments import Input, Int64, Output, Scratch, UInt32
from onchip.kernels.cuda.common.c_struct import CStruct
from onchip.kernels.cuda.common.kernel import CudaKernel, instance
from onchip.kernels.cuda.common.program import Budget, KernelLaunch, Program, Steps, grid_1d
from onchip.network.graph import Network, Node
from onchip.network.layers import ClipScale, GlobalNorm, Reshape
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Cost, Job, Refusal

SOURCE = Path(__file__).with_suffix(".cu")
THREADS, BLOCK_ELEMENTS, MAX_GRADIENTS = 256, 4096, 128
TYPES = {"float32": "float", "float64": "double"}


class GradientStruct(CStruct):
    source, c_name = SOURCE, "Gradient"
    _fields_ = (("values", c_void_p), ("count", c_int64), ("first_block", c_uint32), ("unused", c_uint32))


class GradientsStruct(CStruct):
    source, c_name = SOURCE, "Gradients"
    _fields_ = (("gradient", GradientStruct * MAX_GRADIENTS),)


@dataclass(frozen=True)
class ClipLowering:
    dtype: str
    counts: tuple[int, ...]  # elements of each gradient
    clip_norm: float

    def at(self, B: int) -> Steps:
        launches, first = list[KernelLaunch](), 0
        for begin in range(0, len(self.counts), MAX_GRADIENTS):
            counts = self.counts[begin : begin + MAX_GRADIENTS]
            blocks = [0, *itertools.accumulate(-(-count // BLOCK_ELEMENTS) for count in counts)]
            structs = [
                GradientStruct.of(values=Input(begin + i), count=count, first_block=blocks[i], unused=0)
                for i, count in enumerate(counts)
            ]
            arguments = GradientsStruct.of(gradient=structs), UInt32(len(counts)), Scratch(8 * first)
            program = Program(SOURCE, f"squares<{TYPES[self.dtype]}>")
            launches.append(KernelLaunch(program, grid_1d(blocks[-1]), arguments, Budget(64), after=()))
            first += max(1, blocks[-1])
        bits = int.from_bytes(bytes(c_float(self.clip_norm)), "little")
        last = KernelLaunch(
            Program(SOURCE, f"clip_scale<{TYPES[self.dtype]}>"), grid_1d(1),
            (Scratch(0), Output(0), Int64(first), UInt32(bits)), Budget(64), tuple(range(len(launches))),
        )  # fmt: skip
        return Steps((*launches, last), 8 * first)


class ClipKernel(CudaKernel):
    name = "clip"
    layers = (Reshape, GlobalNorm)
    dtypes = tuple(TYPES)
    order = "per thread, then in a tree, block by block"

    def applies(self, net: Network, start: int) -> bool:
        return bool(_clip_nodes(net, start))

    def offers(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim | Refusal]:
        nodes = _clip_nodes(net, start)
        scale = nodes[-1]
        assert isinstance(scale.layer, ClipScale)
        gradients = [net.types[node.inputs[0]] for node in nodes[: len(scale.inputs)]]
        if len({node.inputs[0] for node in nodes}) != len(nodes):
            yield Refusal(self.name, nodes[0].name, "each gradient once")
            return
        counts = tuple(kind.row_size for kind in gradients)
        lowering = ClipLowering(gradients[0].dtype, counts, scale.layer.clip_norm)
        cost = Cost(sum(map(net.row_flop, nodes)), sum(kind.row_bytes for kind in gradients), launches=2)
        names, label = tuple(node.name for node in nodes), f"clip<{len(gradients)}>"
        yield self.claim(net, nodes[0], lowering, nodes=names, cost=cost, label=label)


def _clip_nodes(net: Network, start: int) -> tuple[Node, ...]:
    """The nodes from net.nodes[start] on to a ClipScale: a row of each gradient, unless they come before; the norm of
    each row; the scale."""
    rows = list(itertools.takewhile(lambda node: _is_row(net, node), net.nodes_from(start)))
    norms = list(itertools.takewhile(lambda node: _is_norm(net, node), net.nodes_from(start + len(rows))))
    before = net.nodes[start - 1 : start] if start else ()
    if not norms or any(_is_row(net, node) if rows else _is_norm(net, node) for node in before):
        return ()
    if rows and [node.inputs for node in norms] != [(node.name,) for node in rows]:
        return ()
    scale = net.nodes[start + len(rows) + len(norms)]
    return (*rows, *norms, scale) if scale.inputs == tuple(node.name for node in norms) else ()


def _is_row(net: Network, node: Node) -> bool:
    """Whether it makes a row of a gradient, only for its norm."""
    reader = _only_reader(net, node)
    return isinstance(node.layer, Reshape) and reader is not None and _is_norm(net, reader)


def _is_norm(net: Network, node: Node) -> bool:
    """Whether it computes the norm of a gradient, of which there is one whatever the batch, only for a ClipScale."""
    reader = _only_reader(net, node)
    return (
        isinstance(node.layer, GlobalNorm)
        and node.layer.axes == (1,)
        and len(net.types[node.inputs[0]].row_shape) == 1
        and reader is not None
        and isinstance(reader.layer, ClipScale)
    )


def _only_reader(net: Network, node: Node) -> Node | None:
    readers = net.readers(node.name)
    return readers[0] if len(readers) == 1 and node.name not in net.kept else None


INSTANCES = (
    instance("squares", ClipLowering("float32", (1000, 10), 1.0)),
    instance("scale", ClipLowering("float32", (1000, 10), 1.0), launch=1),
    instance("float64", ClipLowering("float64", (1000, 10), 1.0)),
)
