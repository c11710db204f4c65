"""conv_fused on the CPU: a whole convolutional network in one parallel loop over tiles of images. Also Linear layers
whose outputs are combined, as in residual MLPs: a vector is an image of one pixel.

Idea    A tile of images runs through every layer while it is in cache, in NHWC; x is read once, y is written once.
        Bias, activation, normalisation, phases of transposed convolutions, concatenation and the conversion to uint8
        happen in place (conv/program.py).
        Each operation has a file (conv/operation.py); one compiled loop runs any list of them (conv/dispatch.py).
Floor   Compute-bound: faces (100-4x4x512-8x8x256-16x16x128-32x32x64-64x64x3) moves 49.6 kB per image and costs 326
        Mflop, 275 without taps outside the image: 0.9 ms at 300 Gflop/s on two cores. Winograd on kernels of two or
        three columns (conv/operations/winograd.py) saves a third of their FMAs. The 20 MB of weights of faces pass
        through the cache once per tile.
Cache   All values of one tile per thread, and the chunk of weights in use.
Limits  float32; one input, one output; images that fit into memory. Winograd's rounding error scales with the values
        under both windows of a pair, and an infinity under one gives NaN in the other. Where several outputs share a
        vector (conv/operations/windows.py), rows with a NaN are recomputed one element at a time to keep it local.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from onchip.kernels.cpu.compiler.compile_ahead import queue_functions
from onchip.kernels.cpu.compiler.emit import LANES
from onchip.kernels.cpu.compiler.jit import address, address_of
from onchip.kernels.cpu.conv.match import subgraphs_of
from onchip.kernels.cpu.conv.operation import CALL_BYTES
from onchip.kernels.cpu.conv.operations.rows import LookUp
from onchip.kernels.cpu.conv.program import SUPPORTED, Program
from onchip.kernels.cpu.conv.scratch import Scratch
from onchip.kernels.cpu.cost import CPU, CoreCost
from onchip.kernels.cpu.kernel import CpuKernel
from onchip.kernels.cpu.memory import aligned_zeros
from onchip.kernels.cpu.threading.launches import CompiledLaunch, Launch
from onchip.network.graph import Network, Node
from onchip.network.layers import Convolution, Linear, TransposedConvolution
from onchip.network.recipe import Array
from onchip.network.types import DTYPE_BYTES
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Job, Refusal, Use
from onchip.plan.layout import CHANNELS_LAST, has_channels

MAX_IMAGES = 16  # per tile: enough gemm rows for the smallest images, and enough to amortise reading the weights
MAX_VECTORS = 64  # per tile, where all values are vectors: each is one gemm row
SHARED_FLOP = 1_000_000  # per operation and image: below this, a barrier per operation costs more than it gains
_MAX_SCRATCH_BYTES = 1 << 30  # per thread


@dataclass(frozen=True, eq=False)
class Facts:
    program: Program
    images: int
    scratch: Scratch
    nhwc: tuple[bool, bool]  # whether x, and whether y, is stored as NHWC


class ConvFusedKernel(CpuKernel):
    name = "conv_fused"
    layers = SUPPORTED
    dtypes = DTYPE_BYTES  # starting_at decides

    def offers(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim | Refusal]:
        subgraph = subgraphs_of(net).starting_at(net, start)
        if isinstance(subgraph, str):
            if subgraph and isinstance(net.nodes[start].layer, Convolution | TransposedConvolution):
                yield Refusal(self.name, net.nodes[start].name, subgraph)
            return
        nodes, program = subgraph.nodes, subgraph.program
        weight_bytes = program.weight_bytes
        image_bytes = 4 * program.scratch(1, device.fast_bytes).floats
        # Many weights: more images per tile amortise them, even if the images then exceed L2.
        cached_images = device.fast_bytes // 2 // max(1, image_bytes)
        max_images = MAX_VECTORS if all(store.H * store.W == 1 for store in program.stores) else MAX_IMAGES
        images = max_images if weight_bytes > device.fast_bytes // 2 else max(1, min(max_images, cached_images))
        images = max(1, min(images, _MAX_SCRATCH_BYTES // max(1, image_bytes)))
        scratch = program.scratch(images, device.fast_bytes)
        scratch_bytes = 4 * scratch.floats
        if scratch_bytes > _MAX_SCRATCH_BYTES:
            yield Refusal(self.name, nodes[0].name, f"needs {scratch_bytes >> 20} MiB of scratch per thread")
            return
        convolutions = [
            node.layer.kind for node in nodes if isinstance(node.layer, Convolution | TransposedConvolution)
        ]
        kinds = convolutions or [node.layer.kind for node in nodes if isinstance(node.layer, Linear)]
        instance = f"conv_fused<{len(kinds)} {'-'.join(dict.fromkeys(kinds))}>"
        x, y = net.types[program.source], net.types[nodes[-1].name]
        why = f"tiles of {images} images stay in cache from layer to layer"
        for nhwc in _layouts(net, nodes, program):
            transposed = (end.row_bytes for end, is_last in zip((x, y), nhwc, strict=True) if not is_last)
            cost = CoreCost(
                program.image_flop,
                x.row_bytes + 4 * sum(map(net.row_lookup_elements, nodes)) + y.row_bytes,
                weight_bytes,
                transposed_bytes=sum(transposed),
                row_cache_bytes=4 * program.image_moves,
                rows_per_core=0 if _is_shared(program) else 1,
                tile_rows=images,
                tile_bytes=weight_bytes if weight_bytes > device.cache_bytes else 0,
                tile_us=CPU.conv_call_us * len(program.operations),
            )
            yield Claim(
                self.name, instance, tuple(node.name for node in nodes), cost, why,
                program.recipes, scratch_bytes, program.order, Facts(program, images, scratch, nhwc),
                reads={program.source: Use(CHANNELS_LAST)} if nhwc[0] else {},
                writes={nodes[-1].name: CHANNELS_LAST} if nhwc[1] else {},
            )  # fmt: skip

    def bind(self, claim: Claim, weights: dict[str, Array]) -> Launch:
        assert isinstance(claim.facts, Facts)
        program, tile = claim.facts.program, claim.facts.images
        queue_functions(dict.fromkeys(map(type, program.operations)))
        table = program.table(weights, claim.facts.scratch, *claim.facts.nhwc)
        floats = claim.facts.scratch.floats + LANES
        # Compiled or loaded for the first network that needs it: takes some seconds.
        from onchip.kernels.cpu.conv.dispatch import run_images

        def facts(threads: int) -> tuple[int, object]:
            scratch, calls = aligned_zeros(threads * floats), aligned_zeros(threads * CALL_BYTES // 8, np.int64)
            addresses = address(table), table.strides[0], address(scratch), address(calls)
            args = np.array((*addresses, len(table), floats, tile, _is_shared(program), program.image_flop), np.int64)
            return address(args), (args, scratch, calls, table, weights)

        launch = CompiledLaunch(address_of(run_images), facts)

        def look_up(inputs: Sequence[Array], outputs: Sequence[Array], threads: int) -> None:
            launch([inputs[0].astype(np.int64, copy=False)], outputs, threads)

        return look_up if any(isinstance(op, LookUp) for op in program.operations) else launch


def _layouts(net: Network, nodes: Sequence[Node], program: Program) -> list[tuple[bool, bool]]:
    """Possible layouts of (x, y), True for NHWC; inputs and outputs of the network are always NCHW."""
    x, y = program.source, nodes[-1].name
    nhwc_in, nhwc_out = program.nhwc_ends()
    ins = (False, True) if nhwc_in and x not in net.inputs and has_channels(net.types[x]) else (False,)
    outs = (False, True) if nhwc_out and net.readers(y) and has_channels(net.types[y]) else (False,)
    return [(x_nhwc, y_nhwc) for x_nhwc in ins for y_nhwc in outs]


def _is_shared(program: Program) -> bool:
    """Whether threads share each operation when there are fewer images than threads."""
    return program.image_flop > SHARED_FLOP * len(program.operations)
