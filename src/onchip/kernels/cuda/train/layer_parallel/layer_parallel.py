"""Host side of train/layer_parallel/layer_parallel.cu: a persistent kernel with blocks per layer of an MLP."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Self

from onchip.kernels.chain import Chain, find_chain
from onchip.kernels.cuda.common.precision import PRECISIONS, round_up
from onchip.kernels.cuda.common.program import (
    Budget,
    Instance,
    Int64,
    KernelLaunch,
    LaunchConfig,
    Memory,
    Program,
    State,
    Steps,
    Struct,
)
from onchip.kernels.cuda.train.large_batch.bytes import ByteRows
from onchip.kernels.cuda.train.large_batch.launches import TrainLowering, cost_of
from onchip.kernels.cuda.train.layer import find_layers, split_evenly
from onchip.kernels.cuda.train.resident.resident import DEADLINE_MS, MAX_LAYERS, MAX_OUTPUTS, STEP_VALUES_BYTES, UNITS
from onchip.kernels.pointwise import TRAINED
from onchip.kernels.training import trained_chain, why_not_plain
from onchip.network.build import mlp
from onchip.network.graph import Network
from onchip.plan.device import H200, Device
from onchip.plan.kernel import LOSSES, OPTIMISERS, Claim, Job, Refusal

ARCHITECTURES = ("sm_90a",)
SOURCE = Path(__file__).parent / "layer_parallel.cu"
ROWS, TEAMS = 64, 2  # rows of a gemm; warpgroups per block
BATCHES = (16, 32, ROWS)  # rows per step, at most
STRIP_BYTES = 16 * ROWS  # per panel of 8 columns
MAX_BYTES = 226 << 10  # dynamic shared memory per block
MAX_UNITS = 1024  # per hidden layer in bf16, held in registers; half as many in a split
MAX_OWN = 8  # 8-column wgmma tiles: tiles per block times bf16 split terms
_BUDGET = Budget(registers=255, spill_bytes=320)
# Step time on an H200: latency per layer and per split term; per element that a block receives; per further tile of a
# block (register spills). Measured with 784-320-160-10, 16 to 64 rows, in bf16, tf32 and fp32. An epoch with 64 rows
# took 6.7, 7.8 and 10.4 ms by events; four networks with two tiles per block 7.7, 9.5 and 16.7; eight with four tiles
# 8.8 in bf16. More tiles per block spill and were not measured.
_LAYER_US, _PART_US, _NUMBER_US, _OWN_US = 1.37, 0.95, 2.7e-5, 0.7
_OWN_OF_MANY = {1: 4, 2: 2, 3: 2}


@dataclass(frozen=True)
class LayerParallelLowering(TrainLowering):
    """All steps of a call in one launch. Memory is State by name, as for mlp_train, and in addition:

    status (2,) uint32: turns taken, and nonzero after a timeout
    forward<l>, backward<l>, columns<l>: exchange buffers with in-band phase bits
    own_mean<l>, own_square<l>: mean<l> and square<l> in register fragment order
    """

    own: int = 1  # tiles of 8 units per block of a hidden layer
    rows: int = ROWS  # one of BATCHES

    @cached_property
    def byte_rows(self) -> ByteRows:
        layer = self.layers[0]
        return ByteRows(layer.terms, layer.N, self.job.byte_scale, self.job.precision, self.device.units)

    @property
    def parts(self) -> int:
        return self.byte_rows.parts

    @property
    def order(self) -> str:
        return (
            f"{self.parts} parts of bf16, steps of 16 terms, {TEAMS} teams by turns; gradients over rows, 16 after 16"
        )

    @cached_property
    def tiles(self) -> list[int]:
        """Tiles of 8 units per layer; hidden layers start at index 1."""
        return [0, *(-(-layer.N // UNITS) for layer in self.layers[:-1])]

    @cached_property
    def strips(self) -> list[int]:
        """Panels of 8 columns of each layer's input and its bias 1: as many K steps of 16 for each warpgroup."""
        ones = (self.layers[0].D, *(UNITS * count for count in self.tiles[1:]))
        return [round_up(one + 1, 16 * TEAMS) // 8 for one in ones]

    @property
    def blocks(self) -> int:
        return sum(-(-count // self.own) for count in self.tiles[1:]) + 1

    def for_networks(self, count: int) -> Self:
        """Use fewer blocks per network, with more tiles each, where that trains `count` networks sooner."""
        best, best_us = self, math.inf
        for own in range(self.own, max(self.own, _OWN_OF_MANY[self.parts]) + 1):
            made = replace(self, own=own)
            at_once = self.device.units // made.blocks
            if made.fits and (us := -(-count // at_once) * made.step_us) < best_us:
                best, best_us = replace(made, networks=split_evenly(count, at_once)), us
        return best

    @property
    def fits(self) -> bool:
        """Whether an SM holds a block, including the static `rule` of each layer."""
        return self.shared_bytes + STEP_VALUES_BYTES * len(self.layers) <= self.device.fast_bytes

    @property
    def step_us(self) -> float:
        """Estimated time per step of all networks of the launch."""
        waits = _LAYER_US * len(self.layers) + _PART_US * (self.parts - 1)
        numbers = self.rows * (self.layers[0].D + (1 + self.parts) * sum(layer.N for layer in self.layers[:-1]))
        return waits + _NUMBER_US * numbers + _OWN_US * self.parts**2 * (self.own - 1)

    # -- memory --------------------------------------------------------------------------------------------------

    def own_memory(self) -> Mapping[str, int]:
        made, kept = {"status": 8}, OPTIMISERS[self.job.optimiser]
        number = 2 if self.parts == 1 else 4  # bytes per element
        for i, layer in enumerate(self.layers):
            blocks = -(-self.tiles[i + 1] // self.own) if i < len(self.layers) - 1 else 1
            strips = self.own if i < len(self.layers) - 1 else round_up(layer.N, 16) // 8
            tiles = round_up(self.strips[i], 8 * TEAMS) // (8 * TEAMS)  # of 64 inputs, per warpgroup
            for name in ("own_mean", "own_square")[:kept]:
                made[f"{name}{i}"] = blocks * tiles * strips * 128 * TEAMS * 16
        for i, count in enumerate(self.tiles[1:]):
            made[f"forward{i}"] = 2 * count * UNITS * self.rows * number
            if 0 < i < len(self.layers) - 2:
                made[f"backward{i}"] = made[f"forward{i}"]
            made[f"columns{i + 1}"] = 2 * self._told_rows(i + 1) * round_up(self.layers[i + 1].N, UNITS) * 4
        return made

    @cached_property
    def shared_bytes(self) -> int:
        """max_bytes of train/layer_parallel/layer_parallel.cuh: shared memory of the largest block."""
        L, parts = len(self.layers), self.parts
        ids = 3 * self.rows * 4
        outputs = round_up(self.layers[-1].N, 16) // 8
        positions = self._positions(L)
        output_bytes = parts * outputs * 16 * positions + outputs * 32
        output_sums = TEAMS * outputs * 128 * 16
        most = round_up(output_bytes + output_sums + ids + 2 * ROWS * 4, 128)
        most += STRIP_BYTES * parts * outputs + self._read_bytes(L)
        for layer in range(1, L):
            came = STRIP_BYTES * (1 if layer == 1 else parts) * self.strips[layer - 1]
            behind = round_up(self.tiles[layer + 1], 2 * TEAMS) if layer < L - 2 else 0
            columns = behind if layer < L - 2 else positions // 8 if layer < L - 1 else 0
            sums = TEAMS * ROWS * 4 * (8 * self.own if self.own % 4 else 8 * self.own + 8)
            rest = parts * self.own * (16 * self._positions(layer) + 128 * columns + STRIP_BYTES) + 32 * self.own
            rest += STRIP_BYTES * parts * behind + ids
            rest += output_bytes + max(sums, output_sums) if layer >= L - 2 else sums
            read, twice = self._read_bytes(layer), 0
            if layer == 1:  # double-buffered x
                left = (MAX_BYTES - max(came + rest, read)) // STRIP_BYTES
                fixed = round_up(max(self.strips[0] - max(left, 0), 0), 8)
                twice = max(self.strips[0] - fixed, 0)
            most = max(most, twice * STRIP_BYTES + max(came + rest, read))
        return most

    def _positions(self, layer: int) -> int:
        """K size of a layer's gemm. A operands from registers round it up to groups of 32 units."""
        if layer == 1 or (self.parts > 1 and layer < len(self.layers)):
            return 8 * self.strips[layer - 1]
        needed = -(-self.tiles[layer - 1] // (4 * TEAMS))
        turns = -(-needed // 4)
        return 32 * TEAMS * turns * -(-needed // turns)

    def _told_rows(self, i: int) -> int:
        """Rows of layer i's weights in the exchange: inputs, and the output layer's bias."""
        return UNITS * self.tiles[i] + (i == len(self.layers) - 1)

    def _read_bytes(self, layer: int) -> int:
        """Shared memory of the input that the dW gemm reads."""
        strips = self.strips[layer - 1]
        return STRIP_BYTES * ((self.parts - 1 if layer > 1 else 0) * strips + round_up(strips, 8 * TEAMS))

    # -- launches ------------------------------------------------------------------------------------------------

    def graphs_of(self, count: int) -> Sequence[int]:
        return (0,)  # one graph for any count

    def steps(self, count: int) -> Steps:
        kept = OPTIMISERS[self.job.optimiser]
        codes = LOSSES.index(self.job.loss)
        for number, layer in enumerate(self.layers, 1):
            codes |= layer.activation[0] << 4 * number
        widths = ", ".join(map(str, (self.layers[0].D, *(layer.N for layer in self.layers))))
        program = Program(
            SOURCE, f"train_layer_parallel<{self.parts}, {self.own}, {self.rows}, {kept}, {codes}ull, {widths}>"
        )
        pointers: list[Memory | Int64] = [
            State("bytes"), State("targets"), State("order"), State("rules"), State("progress"), State("step_losses"),
            State("step_correct"), State("status"),
        ]  # fmt: skip
        places = self.own_memory()
        for i in range(len(self.layers)):
            pointers.append(State(f"w{i}"))
            pointers += [State(f"{each}{i}") if at < kept else Int64(0) for at, each in enumerate(("mean", "square"))]
            names = (f"{each}{i}" for each in ("own_mean", "own_square", "forward", "backward", "columns"))
            pointers += [State(name) if name in places else Int64(0) for name in names]
        data = struct.pack(
            "<qqqfI", self.job.batch, self.byte_rows.stride, self.apart, self.job.byte_scale, DEADLINE_MS
        )
        for layer in self.layers:
            data += struct.pack("<iII", layer.stride, layer.bias is not None, layer.activation[1])
        data += bytes(-len(data) % 8)
        config = LaunchConfig((self.blocks, self.networks, 1), (128 * TEAMS, 1, 1), self.shared_bytes, cooperative=True)
        return Steps((KernelLaunch(program, config, (Struct(tuple(pointers), data),), _BUDGET),))


def make_lowering(chain: Chain, job: Job, device: Device) -> LayerParallelLowering | str:
    """Returns the lowering, or the reason for a refusal."""
    layers = find_layers(chain)
    if why := why_not_plain(job):
        return why
    if not job.byte_scale:
        return "takes rows of pixels, whole numbers below 256 times a scale"
    if not 2 <= len(layers) <= MAX_LAYERS:
        return f"takes 2 to {MAX_LAYERS} layers, got {len(layers)}"
    if layers[-1].N > MAX_OUTPUTS:
        return f"at most {MAX_OUTPUTS} outputs, got {layers[-1].N}"
    if job.batch > ROWS:
        return f"batches of at most {ROWS} rows, got {job.batch:,}"
    rows = next(rows for rows in BATCHES if rows >= job.batch)
    most = MAX_UNITS // (1 if LayerParallelLowering(layers, job, device).parts == 1 else 2)
    if (widest := max(layer.N for layer in layers[:-1])) > most:
        return f"hidden layers of at most {most} units in {job.precision}, got {widest:,}"
    for own in range(1, MAX_OWN + 1):
        lowering = LayerParallelLowering(layers, job, device, own=own, rows=rows)
        if lowering.blocks > device.units:
            continue
        if not lowering.fits:
            return f"does not fit: {lowering.shared_bytes:,} B of shared memory, a block has {device.fast_bytes:,} B"
        if own * lowering.parts > MAX_OWN:
            break
        return lowering
    return f"its layers want more blocks than {device.units} multiprocessors"


class MlpTrainLayerParallel:
    name = "mlp_train_layer_parallel"
    device_kind = "cuda"
    precisions = tuple(PRECISIONS)

    def claims(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim | Refusal]:
        chain = trained_chain(net, start, job)
        if chain is None or device.arch not in ARCHITECTURES:
            return  # mlp_train reports the reason
        lowering = make_lowering(chain, job, device)
        if isinstance(lowering, str):
            yield Refusal(self.name, net.nodes[0].name, lowering)
            return
        yield Claim(
            self.name, f"mlp_train_layer_parallel<{chain.label},{job.loss}>", chain.nodes,
            cost_of(net, lowering, launches=0, min_us=lowering.step_us),
            why=f"{lowering.blocks} blocks keep a layer's weights each and take step after step in one launch; "
            "rows are bytes",
            fast_bytes=lowering.shared_bytes, facts=lowering, order=lowering.order,
        )  # fmt: skip


# -- instances for make check-kernels ------------------------------------------------------------------------------


def _instance(what: str, job: Job, *widths: int, networks: int = 1) -> Instance:
    def launch(_: Device) -> KernelLaunch:
        chain = find_chain(mlp(*widths), 0, TRAINED)
        assert chain is not None
        lowering = make_lowering(chain, job, H200)
        assert isinstance(lowering, LayerParallelLowering)
        return lowering.for_networks(networks).steps(0).launches[0]

    return Instance(what, launch)


INSTANCES = (
    *(
        _instance(f"digits {precision}", Job(precision, 64, "cross_entropy", byte_scale=1 / 255), 784, 320, 160, 10)
        for precision in ("fp32", "tf32", "bf16")
    ),
    *(
        _instance(
            f"digits {precision}, 8 networks",
            Job(precision, 64, "cross_entropy", byte_scale=1 / 255),
            784,
            320,
            160,
            10,
            networks=8,
        )
        for precision in ("fp32", "bf16")
    ),
    _instance("digits fp32, adam", Job("fp32", 64, "cross_entropy", "adam", byte_scale=1 / 255), 784, 320, 160, 10),
    _instance("four layers, momentum", Job("bf16", 32, "mse", "momentum", byte_scale=1 / 255), 20, 53, 29, 17, 5),
)
