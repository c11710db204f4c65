"""Host side of train/resident/resident.cu: a persistent kernel that trains a small MLP in shared memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from ctypes import c_void_p
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Self

from onchip.kernels.chain import Chain
from onchip.kernels.cuda.common.arguments import State
from onchip.kernels.cuda.common.c_struct import CStruct
from onchip.kernels.cuda.common.costs import costs_of
from onchip.kernels.cuda.common.precision import PRECISIONS, round_up
from onchip.kernels.cuda.common.program import Budget, KernelLaunch, LaunchConfig, Program, Steps
from onchip.kernels.cuda.train.kernel import TrainKernel, step_instance
from onchip.kernels.cuda.train.large_batch.bytes import ByteRows
from onchip.kernels.cuda.train.large_batch.launches import DIGITS, LargeBatchLowering
from onchip.kernels.cuda.train.large_batch.structs import state_if
from onchip.kernels.cuda.train.layer import find_layers, split_evenly
from onchip.kernels.cuda.train.phases import counting_instance
from onchip.kernels.cuda.train.resident.args import MAX_LAYERS, args_structs, pack_args, template_codes
from onchip.kernels.training import why_unsupported
from onchip.network.training import OPTIMISERS, TrainingStep
from onchip.plan.device import H200, Device
from onchip.plan.kernel import Job

ARCHITECTURES = ("sm_90a", "sm_100")  # with 227 KB of shared memory
SOURCE = Path(__file__).parent / "resident.cu"
THREADS, WARPS = 512, 16  # threads and warps per block
UNITS = 8  # per tile that a block owns
MAX_OUTPUTS = 32
ROWS = (16, 32, 64)  # per group, at most
MAX_BYTES = 226 << 10  # dynamic shared memory per block
MAX_PARTIALS = 8192  # floats of split-K partial sums
STEP_VALUES_BYTES = 32  # static shared memory of StepValues
_BUDGET = Budget(registers=128, spill_bytes=640)  # spills around the waits of an exchange
_MANY_TILES_BUDGET = Budget(registers=128, spill_bytes=960)  # for blocks that own more tiles than in a single network


class LayerState(CStruct):
    source, c_name = SOURCE.parent / "weights.cuh", "LayerState"
    _fields_ = (
        ("w", c_void_p), ("mean", c_void_p), ("square", c_void_p), ("col_mean", c_void_p), ("col_square", c_void_p),
        ("forward", c_void_p), ("backward", c_void_p),
    )  # fmt: skip


ARGS = args_structs(SOURCE.parent / "step.cuh", "ResidentArgs", LayerState, "partner_buffer")


@dataclass(frozen=True)
class ResidentLowering(LargeBatchLowering):
    """All steps of a call in one launch. Memory is State by name, as for mlp_train, and in addition:

    status (2,) uint32: exchange rounds, and nonzero after a timeout
    step_losses, step_correct (steps, groups)
    forward<l>, backward<l>, exchanged, float32: exchange buffers with in-band phase bits
    col_mean<l>, col_square<l>, as mean<l> and square<l>; for the output layer (blocks, N)
    """

    groups: int = 1  # groups of blocks, each with its own rows
    rows: int = 16  # per step and group
    blocks: int = 1  # per group
    order_blocks: int = 1  # blocks per group of a single network: sets the reduction order

    @cached_property
    def byte_rows(self) -> ByteRows | None:
        layer = self.layers[0]
        if not self.training.byte_scale:
            return None
        return ByteRows(layer.terms, layer.N, self.training.byte_scale, self.precision, self.device.units)

    @property
    def why(self) -> str:
        where = f"{self.groups} x {self.blocks}" if self.groups > 1 else f"{self.blocks}"
        rows = "; uint8 rows" if self.byte_rows else ""
        return f"one launch for all steps: persistent kernel, {where} blocks with resident weights{rows}"

    @property
    def order(self) -> str:
        return f"chunks of 16 K elements, split-K over {WARPS} warps; gradients over rows, {self.groups} groups"

    def for_networks(self, count: int) -> Self:
        """Use fewer blocks per network, with more tiles each, if that trains `count` networks faster."""
        best, best_us = self, math.inf
        for blocks in sorted({_blocks_of(self._hidden_tiles, most) for most in range(1, max(self._hidden_tiles) + 1)}):
            lowering = replace(self, blocks=min(blocks, self.order_blocks))
            at_once = self.device.units // (self.groups * lowering.blocks)
            if lowering.fits and (us := -(-count // at_once) * lowering.step_us) <= best_us:
                best, best_us = replace(lowering, networks=split_evenly(count, at_once)), us
        return best

    @property
    def step_us(self) -> float:
        """Estimated time per step of all networks of the launch. Gemm time grows with the tiles per block."""
        elements = 2 * self.layers[0].D + 3 * sum(layer.N for layer in self.layers[:-1])  # per row and block
        costs = costs_of(self.device).resident
        waits_us = costs.step_us + costs.layer_us * len(self.layers) + costs.group_us * (self.groups - 1)
        row_us = costs.element_us[self.precision] * self.rows * elements
        return waits_us + row_us * self.order_blocks / self.blocks

    @property
    def fits(self) -> bool:
        """Whether shared memory holds a block, and the partial sums of the split-K that the reduction order needs."""
        row_tiles, spare = self.rows // 16, replace(self, blocks=self.order_blocks)._partial_floats
        for layer in self.layers[1:-1]:
            splits = min(WARPS // row_tiles, -(-layer.N // 16), 1 + spare // (row_tiles * 128))
            if (splits - 1) * row_tiles * 128 > self._partial_floats:
                return False
        return self.shared_bytes + STEP_VALUES_BYTES <= self.device.fast_bytes

    def owned_units(self, layer: int) -> int:
        """Most units per block of a hidden layer; hidden layers start at 1."""
        return UNITS * -(-self._tiles(layer) // self.blocks)

    def _tiles(self, layer: int) -> int:
        return -(-self.layers[layer - 1].N // UNITS)

    @property
    def _hidden_tiles(self) -> list[int]:
        return [self._tiles(layer) for layer in range(1, len(self.layers))]

    @property
    def _widths(self) -> list[int]:
        return [self.layers[0].D, *(layer.N for layer in self.layers)]

    is_persistent = True

    def launch_estimates(self, count: int) -> list[float]:
        return [self.step_us * count]

    @property
    def launches_per_step(self) -> int:
        return 0  # one for all steps

    @property
    def fast_bytes(self) -> int:
        return self.shared_bytes

    # -- memory --------------------------------------------------------------------------------------------------

    def extra_memory(self) -> Mapping[str, int]:
        last, moments = len(self.layers) - 1, OPTIMISERS[self.training.optimiser]
        sizes = {"status": 8, "exchanged": 4 * self._exchanged_floats}
        for i, layer in enumerate(self.layers):
            units = round_up(layer.N + (2 if i == last else 0), UNITS)  # plus loss and correct prediction
            sizes[f"forward{i}"] = sizes[f"backward{i}"] = 4 * self.groups * 2 * self.rows * units
            if i == last:
                sizes[f"backward{i}"] = 4 * self.groups * 2 * layer.N * round_up(layer.D, UNITS)
            for name in ("col_mean", "col_square")[:moments]:
                sizes[f"{name}{i}"] = 4 * (self.blocks * layer.N if i == last else layer.N * layer.stride)
        return sizes

    @property
    def _exchanged_floats(self) -> int:
        """Size of the Partners buffer of train/resident/resident.cuh: chunks of four gradients per thread."""
        chunks, widths = 0, self._widths
        for layer in range(1, len(self.layers) + 1):
            if layer < len(self.layers):  # tiles of 32 inputs, 8 elements per lane and a bias
                chunks += -(-9 * -(-(-(-widths[layer - 1] // 32) * self.owned_units(layer) // UNITS) // WARPS) // 4)
            if layer > 1:  # tiles of 16 owned inputs, 4 elements
                tiles = -(-self.owned_units(layer - 1) // 16) * -(-widths[layer] // UNITS)
                chunks += -(-5 * -(-tiles // WARPS) // 4)
        return 2 * 2 * self.blocks * chunks * THREADS * 4 if self.groups > 1 else 4

    @property
    def _partial_floats(self) -> int:
        """Floats for split-K partial sums: SCRATCH_FLOATS of SharedLayout."""
        outputs = self.rows * (round_up(self.layers[-1].N + 2, 16) + 4)
        left = self._layout[1]
        return left if left > outputs else outputs

    @property
    def shared_bytes(self) -> int:
        return 4 * sum(self._layout)

    @cached_property
    def _layout(self) -> tuple[int, int]:
        """SharedLayout of train/resident/resident.cuh, in floats: all but PARTIALS, and PARTIALS."""
        widths, L, rows, head_rows = self._widths, len(self.layers), self.rows, -(-self.rows // self.blocks)
        pitch = [round_up(width, 16) + 4 for width in [*widths[:L], widths[L] + 2]]
        owned = [0, *(self.owned_units(layer) for layer in range(1, L))]
        weight_rows = [0, *owned[1:], widths[L]]
        floats = rows * (round_up(widths[0], 16) + (8 if self.byte_rows else 4)) // (4 if self.byte_rows else 1)
        floats += rows * sum(pitch[1:L]) + sum(weight_rows[i] * pitch[i - 1] for i in range(1, L + 1))
        floats += sum(owned[i - 1] * pitch[i] for i in range(2, L + 1))
        floats += max(rows * pitch[L], head_rows * (pitch[L - 1] + pitch[L]))
        floats += rows * max(owned[i] + 2 for i in range(1, L)) + sum(weight_rows) + 3 * rows
        floats = round_up(floats, 4)
        left = max(0, MAX_BYTES // 4 - floats)
        return floats, left // 128 * 128 if left < MAX_PARTIALS else MAX_PARTIALS

    # -- launches ------------------------------------------------------------------------------------------------

    def graphs_of(self, count: int) -> Sequence[int]:
        return (0,)  # one graph for any count

    def steps(self, count: int) -> Steps:
        P = PRECISIONS[self.precision].name
        X = "unsigned char" if self.byte_rows else "float"
        moments = OPTIMISERS[self.training.optimiser]
        options = f"{P}, {X}, {self.groups}, {self.rows}, {self.blocks}, {self.order_blocks}, {moments}"
        program = Program(SOURCE, f"train_resident<{options}, {template_codes(self)}>")
        layers = [
            LayerState.of(
                w=State(f"w{i}"), mean=state_if(moments > 0, f"mean{i}"), square=state_if(moments > 1, f"square{i}"),
                col_mean=state_if(moments > 0, f"col_mean{i}"), col_square=state_if(moments > 1, f"col_square{i}"),
                forward=State(f"forward{i}"), backward=State(f"backward{i}"),
            )
            for i in range(len(self.layers))
        ]  # fmt: skip
        args = pack_args(ARGS, self, layers, partner_buffer=State("exchanged"))
        grid = self.groups * self.blocks, self.networks, 1
        config = LaunchConfig(grid, (THREADS, 1, 1), self.shared_bytes, cooperative=True)
        budget = _BUDGET if self.blocks == self.order_blocks else _MANY_TILES_BUDGET
        return Steps((KernelLaunch(program, config, (args,), budget),))


def make_lowering(
    chain: Chain, training: TrainingStep, precision: str, batch: int, device: Device
) -> ResidentLowering | str:
    """Returns the lowering, or the reason for a refusal."""
    layers = find_layers(chain)
    if why := why_unsupported(training):
        return why
    if not 2 <= len(layers) <= MAX_LAYERS:
        return f"2 to {MAX_LAYERS} layers, got {len(layers)}"
    if layers[-1].N > MAX_OUTPUTS:
        return f"at most {MAX_OUTPUTS} outputs, got {layers[-1].N}"
    tiles = [-(-layer.N // UNITS) for layer in layers[:-1]]
    # Two groups if they fit, for batches above 16 rows and without optimiser moments, which would need synchronisation.
    groups = 2 if training.optimiser == "sgd" and batch > ROWS[0] and 2 * max(tiles) <= device.units else 1
    if batch > groups * ROWS[-1]:
        return f"batches of at most {groups * ROWS[-1]} rows, got {batch:,}"
    rows = next(rows for rows in ROWS if groups * rows >= batch)
    blocks = _blocks_of(tiles, most=-(-max(tiles) // (device.units // groups)))
    lowering = ResidentLowering(
        layers, training, precision, batch, device, groups=groups, rows=rows, blocks=blocks, order_blocks=blocks
    )
    if not lowering.fits:
        return f"does not fit: {lowering.shared_bytes:,} B of shared memory, a block has {device.fast_bytes:,} B"
    return lowering


def _blocks_of(tiles: Sequence[int], most: int) -> int:
    """Blocks that own 1 to `most` tiles per hidden layer: no block waits for an idle one."""
    blocks = max(-(-count // most) for count in tiles)
    return max(-(-count // -(-count // blocks)) for count in tiles)


class MlpTrainResidentKernel(TrainKernel):
    name = "mlp_train_resident"
    architectures = ARCHITECTURES
    make_lowering = staticmethod(make_lowering)


def _step(precision: str, batch: int, byte_scale: float = 1 / 255) -> tuple[TrainingStep, Job]:
    return TrainingStep("cross_entropy", byte_scale=byte_scale), Job(precision, batch)


INSTANCES = (
    step_instance("digits fp32, two groups", make_lowering, _step("fp32", 64), DIGITS, H200),
    counting_instance(step_instance("digits fp32, two groups", make_lowering, _step("fp32", 64), DIGITS, H200)),
    step_instance("digits bf16", make_lowering, _step("bf16", 16), DIGITS, H200),
    step_instance("digits fp32, floats", make_lowering, _step("fp32", 64, 0.0), DIGITS, H200),
    step_instance("digits fp32, eight networks", make_lowering, _step("fp32", 64), DIGITS, H200, networks=8),
    step_instance(
        "four layers, adam", make_lowering, (TrainingStep("mse", "adam"), Job("tf32", 32)), (20, 53, 29, 17, 5), H200
    ),
)
