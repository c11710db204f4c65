"""conv_fused on the CPU: a whole convolutional network in one parallel loop over tiles of images; or one of Linear
layers whose values meet, as in residual MLPs: vectors are images of one pixel.

Idea    Some images go through every layer while they lie in cache, channels last; the batch is read once, the result
        written once. Bias, activation, normalisation, the phases of a transposed convolution, concatenation and the
        conversion to bytes happen where the numbers lie (conv/program.py).
        Each operation has a file (conv/operation.py); one compiled loop runs any list of them (conv/dispatch.py).
Floor   Compute, by far: faces (100-4x4x512-8x8x256-16x16x128-32x32x64-64x64x3) moves 49.6 kB an image and costs 326
        Mflop, 275 without taps that fall outside: 0.9 ms at 300 Gflop/s on two cores. Convolutions of two or three
        taps along a row go in pairs of outputs (conv/operations/winograd.py), which saves a third of those products.
        Its 20 MB of weights pass through the cache once for each tile of images.
Cache   All values of a tile of images a thread, and the chunk of weights in use.
Limits  float32, one value in and one out; images that fit into memory. A pair of outputs is
        rounded by the size of all numbers under both windows, and an infinity under one is a NaN there.
        Rows of outputs with a NaN among them are made again one number at a time, where outputs share a vector
        (conv/operations/windows.py), so that it stays in its window.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from onchip.kernels.cpu.compiler.compile_ahead import announce
from onchip.kernels.cpu.compiler.emit import LANES
from onchip.kernels.cpu.compiler.jit import address, address_of
from onchip.kernels.cpu.conv.match import runs_of
from onchip.kernels.cpu.conv.operation import CALL_BYTES
from onchip.kernels.cpu.conv.operations.rows import LookUp
from onchip.kernels.cpu.conv.program import SUPPORTED, Program
from onchip.kernels.cpu.conv.scratch import Scratch
from onchip.kernels.cpu.cost import CoreCost
from onchip.kernels.cpu.memory import aligned_zeros
from onchip.kernels.cpu.threading.launches import CompiledLaunch, Launch
from onchip.network.graph import Network, Node
from onchip.network.layers import Convolution, Linear, TransposedConvolution
from onchip.network.recipe import Array
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Job, Refusal, Use
from onchip.plan.layout import CHANNELS_LAST, has_channels

MAX_IMAGES = 16  # of a tile: enough rows for the products of the smallest images, and to pay for reading the weights
MAX_VECTORS = 64  # the same, where all values are vectors: a row of a product each
_SHARED_FLOP = 1_000_000  # an operation of a single image; with fewer, waiting for each other costs more than it gains
_CALL_US = 0.5  # to set out on an operation: its row of the table, and sizes that the last one did not have
_MAX_SCRATCH_BYTES = 1 << 30  # a thread's; images that need more are no small network's


@dataclass(frozen=True, eq=False)
class Facts:
    program: Program
    images: int
    scratch: Scratch
    last: tuple[bool, bool]  # whether x, and y, lies with channels last


class ConvFused:
    name = "conv_fused"
    device_kind = "cpu"
    precisions = ("fp32",)

    def claims(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim | Refusal]:
        if job.is_training or not isinstance(net.nodes[start].layer, SUPPORTED):
            return
        run = runs_of(net).at(net, start)
        if isinstance(run, str):
            if run and isinstance(net.nodes[start].layer, Convolution | TransposedConvolution):
                yield Refusal(self.name, net.nodes[start].name, run)
            return
        nodes, program = run.nodes, run.program
        weight_bytes = program.weight_bytes
        image_bytes = 4 * program.scratch(1, device.fast_bytes).floats
        # Many weights are worth more images a tile, even where those do not stay in L2.
        fitting = device.fast_bytes // 2 // max(1, image_bytes)
        most = MAX_VECTORS if all(store.H * store.W == 1 for store in program.stores) else MAX_IMAGES
        images = most if weight_bytes > device.fast_bytes // 2 else max(1, min(most, fitting))
        images = max(1, min(images, _MAX_SCRATCH_BYTES // max(1, image_bytes)))
        scratch = program.scratch(images, device.fast_bytes)
        scratch_bytes = 4 * scratch.floats
        if scratch_bytes > _MAX_SCRATCH_BYTES:
            yield Refusal(self.name, nodes[0].name, f"{scratch_bytes >> 20} MiB of values a thread")
            return
        convolutions = [
            node.layer.kind for node in nodes if isinstance(node.layer, Convolution | TransposedConvolution)
        ]
        products = convolutions or [node.layer.kind for node in nodes if isinstance(node.layer, Linear)]
        instance = f"conv_fused<{len(products)} {'-'.join(dict.fromkeys(products))}>"
        x, y = net.types[program.source], net.types[nodes[-1].name]
        why = f"{images} rows at a time, as many through a layer as stay in cache"
        for last in _layouts(net, nodes, program):
            turned = (given.row_bytes for given, is_last in zip((x, y), last, strict=True) if not is_last)
            cost = CoreCost(
                program.image_flop,
                x.row_bytes + 4 * sum(map(net.row_looked_up, nodes)) + y.row_bytes,
                weight_bytes,
                transposed_bytes=sum(turned),
                row_cache_bytes=4 * program.image_moves,
                rows_per_core=0 if _is_shared(program) else 1,
                tile_rows=images,
                tile_bytes=weight_bytes if weight_bytes > device.cache_bytes else 0,
                tile_us=_CALL_US * len(program.operations),
            )
            yield Claim(
                self.name, instance, tuple(node.name for node in nodes), cost, why,
                program.recipes, scratch_bytes, program.order, Facts(program, images, scratch, last),
                reads={program.source: Use(CHANNELS_LAST)} if last[0] else {},
                writes={nodes[-1].name: CHANNELS_LAST} if last[1] else {},
            )  # fmt: skip

    def bind(self, claim: Claim, weights: dict[str, Array]) -> Launch:
        assert isinstance(claim.facts, Facts)
        program, tile = claim.facts.program, claim.facts.images
        announce(dict.fromkeys(map(type, program.operations)))
        table = program.table(weights, claim.facts.scratch, *claim.facts.last)
        own = claim.facts.scratch.floats + LANES
        # Compiled, or loaded, for the first network that needs it: it takes some seconds.
        from onchip.kernels.cpu.conv.dispatch import run_images

        def facts(threads: int) -> tuple[int, object]:
            scratch, calls = aligned_zeros(threads * own), aligned_zeros(threads * CALL_BYTES // 8, np.int64)
            places = address(table), table.strides[0], address(scratch), address(calls)
            net = np.array((*places, len(table), own, tile, _is_shared(program), program.image_flop), np.int64)
            return address(net), (net, scratch, calls, table, weights)

        launch = CompiledLaunch(address_of(run_images), facts)

        def look_up(inputs: Sequence[Array], outputs: Sequence[Array], threads: int) -> None:
            launch([inputs[0].astype(np.int64, copy=False)], outputs, threads)

        return look_up if any(isinstance(op, LookUp) for op in program.operations) else launch


def _layouts(net: Network, nodes: Sequence[Node], program: Program) -> list[tuple[bool, bool]]:
    """The ways in which x and y may lie, True for channels last: not at the network's own ends, which lie in rows."""
    x, y = program.source, nodes[-1].name
    can_take, can_give = program.lies_at_ends()
    ins = (False, True) if can_take and x not in net.inputs and has_channels(net.types[x]) else (False,)
    outs = (False, True) if can_give and net.readers(y) and has_channels(net.types[y]) else (False,)
    return [(last_in, last_out) for last_in in ins for last_out in outs]


def _is_shared(program: Program) -> bool:
    """Whether the threads share the operations of fewer images than there are threads."""
    return program.image_flop > _SHARED_FLOP * len(program.operations)
