"""Host side of train/layer_parallel/layer_parallel.cu: a persistent kernel with blocks per layer of an MLP."""

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
from onchip.kernels.cuda.common.precision import round_up
from onchip.kernels.cuda.common.program import Budget, KernelLaunch, LaunchConfig, Program, Steps
from onchip.kernels.cuda.train.kernel import TrainKernel, step_instance
from onchip.kernels.cuda.train.large_batch.bytes import ByteRows
from onchip.kernels.cuda.train.large_batch.launches import DIGITS, LargeBatchLowering
from onchip.kernels.cuda.train.large_batch.structs import state_if
from onchip.kernels.cuda.train.layer import find_layers, split_evenly
from onchip.kernels.cuda.train.phases import counting_instance
from onchip.kernels.cuda.train.resident.args import MAX_LAYERS, args_structs, pack_args, template_codes
from onchip.kernels.cuda.train.resident.resident import MAX_OUTPUTS, STEP_VALUES_BYTES, UNITS
from onchip.kernels.training import why_unsupported
from onchip.network.training import OPTIMISERS, TrainingStep
from onchip.plan.device import H200, Device
from onchip.plan.kernel import Job

ARCHITECTURES = ("sm_90a",)
SOURCE = Path(__file__).parent / "layer_parallel.cu"
ROWS, WARPGROUPS = 64, 2  # rows of a gemm; warpgroups per block
BATCHES = (16, 32, ROWS)  # rows per step, at most
PANEL_BYTES = 16 * ROWS  # per panel of 8 columns
MAX_BYTES = 226 << 10  # dynamic shared memory per block
MAX_UNITS = 1024  # per hidden layer in bf16, in registers; half as many with more splits
MAX_OWNED_TILES = 8  # wgmma tiles of 8 columns: tiles per block times bf16 splits
_BUDGET = Budget(registers=255, spill_bytes=320)
_OWNED_TILES_OF_MANY = {1: 4, 2: 2, 3: 2}  # by bf16 splits; more tiles per block spill and were not measured


class LayerBuffers(CStruct):
    source, c_name = SOURCE.with_suffix(".cuh"), "LayerBuffers"
    _fields_ = (
        ("w", c_void_p), ("mean", c_void_p), ("square", c_void_p), ("frag_mean", c_void_p), ("frag_square", c_void_p),
        ("forward", c_void_p), ("backward", c_void_p), ("columns", c_void_p),
    )  # fmt: skip


ARGS = args_structs(SOURCE.with_suffix(".cuh"), "ParallelArgs", LayerBuffers)


@dataclass(frozen=True)
class LayerParallelLowering(LargeBatchLowering):
    """All steps of a call in one launch. Memory is State by name, as for mlp_train, and in addition:

    status (2,) uint32: exchange rounds, and nonzero after a timeout
    forward<l>, backward<l>, columns<l>: exchange buffers with in-band phase bits
    frag_mean<l>, frag_square<l>: mean<l> and square<l> in register fragment order
    """

    owned: int = 1  # tiles of 8 units per block of a hidden layer
    rows: int = ROWS  # one of BATCHES

    @cached_property
    def byte_rows(self) -> ByteRows:
        layer = self.layers[0]
        return ByteRows(layer.terms, layer.N, self.training.byte_scale, self.precision, self.device.units)

    @property
    def splits(self) -> int:
        return self.byte_rows.splits

    @property
    def why(self) -> str:
        return f"one launch for all steps: persistent kernel, {self.blocks} blocks, each for one layer; uint8 rows"

    @property
    def order(self) -> str:
        return (
            f"{self.splits} bf16 splits, K steps of 16 over {WARPGROUPS} warpgroups; gradients over rows in steps of 16"
        )

    @cached_property
    def tiles(self) -> list[int]:
        """Tiles of 8 units per layer; hidden layers start at index 1."""
        return [0, *(-(-layer.N // UNITS) for layer in self.layers[:-1])]

    @cached_property
    def panels(self) -> list[int]:
        """Panels of 8 columns of each layer's input and its bias 1: equally many K steps of 16 per warpgroup."""
        ones = (self.layers[0].D, *(UNITS * count for count in self.tiles[1:]))
        return [round_up(one + 1, 16 * WARPGROUPS) // 8 for one in ones]

    @property
    def blocks(self) -> int:
        return sum(-(-count // self.owned) for count in self.tiles[1:]) + 1

    def for_networks(self, count: int) -> Self:
        """Use fewer blocks per network, with more tiles each, if that trains `count` networks faster."""
        best, best_us = self, math.inf
        for owned in range(self.owned, max(self.owned, _OWNED_TILES_OF_MANY[self.splits]) + 1):
            lowering = replace(self, owned=owned)
            at_once = self.device.units // lowering.blocks
            if lowering.fits and (us := -(-count // at_once) * lowering.step_us) < best_us:
                best, best_us = replace(lowering, networks=split_evenly(count, at_once)), us
        return best

    @property
    def fits(self) -> bool:
        """Whether shared memory holds a block, including the static StepValues of each layer."""
        return self.shared_bytes + STEP_VALUES_BYTES * len(self.layers) <= self.device.fast_bytes

    @property
    def step_us(self) -> float:
        """Estimated time per step of all networks of the launch."""
        costs = costs_of(self.device).layer_parallel
        waits = costs.layer_us * len(self.layers) + costs.split_us * (self.splits - 1)
        elements = self.rows * (self.layers[0].D + (1 + self.splits) * sum(layer.N for layer in self.layers[:-1]))
        return waits + costs.element_us * elements + costs.tile_us * self.splits**2 * (self.owned - 1)

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
        sizes, moments = {"status": 8}, OPTIMISERS[self.training.optimiser]
        item_bytes = 2 if self.splits == 1 else 4
        for i, layer in enumerate(self.layers):
            blocks = -(-self.tiles[i + 1] // self.owned) if i < len(self.layers) - 1 else 1
            panels = self.owned if i < len(self.layers) - 1 else round_up(layer.N, 16) // 8
            tiles = round_up(self.panels[i], 8 * WARPGROUPS) // (8 * WARPGROUPS)  # of 64 inputs, per warpgroup
            for name in ("frag_mean", "frag_square")[:moments]:
                sizes[f"{name}{i}"] = blocks * tiles * panels * 128 * WARPGROUPS * 16
        for i, count in enumerate(self.tiles[1:]):
            sizes[f"forward{i}"] = 2 * count * UNITS * self.rows * item_bytes
            if 0 < i < len(self.layers) - 2:
                sizes[f"backward{i}"] = sizes[f"forward{i}"]
            sizes[f"columns{i + 1}"] = 2 * self._sent_rows(i + 1) * round_up(self.layers[i + 1].N, UNITS) * 4
        return sizes

    @cached_property
    def shared_bytes(self) -> int:
        """max_bytes of train/layer_parallel/layer_parallel.cuh: shared memory of the largest block."""
        L, splits = len(self.layers), self.splits
        ids = 3 * self.rows * 4
        outputs = round_up(self.layers[-1].N, 16) // 8
        k_size = self._k_size(L)
        output_bytes = splits * outputs * 16 * k_size + outputs * 32
        output_sums = WARPGROUPS * outputs * 128 * 16
        most = round_up(output_bytes + output_sums + ids + 2 * ROWS * 4, 128)
        most += PANEL_BYTES * splits * outputs + self._read_bytes(L)
        for layer in range(1, L):
            inputs = PANEL_BYTES * (1 if layer == 1 else splits) * self.panels[layer - 1]
            next_panels = round_up(self.tiles[layer + 1], 2 * WARPGROUPS) if layer < L - 2 else 0
            columns = next_panels if layer < L - 2 else k_size // 8 if layer < L - 1 else 0
            sums = WARPGROUPS * ROWS * 4 * (8 * self.owned if self.owned % 4 else 8 * self.owned + 8)
            rest = splits * self.owned * (16 * self._k_size(layer) + 128 * columns + PANEL_BYTES) + 32 * self.owned
            rest += PANEL_BYTES * splits * next_panels + ids
            rest += output_bytes + max(sums, output_sums) if layer >= L - 2 else sums
            read, doubled = self._read_bytes(layer), 0
            if layer == 1:  # double-buffered x
                left = (MAX_BYTES - max(inputs + rest, read)) // PANEL_BYTES
                fixed = round_up(max(self.panels[0] - max(left, 0), 0), 8)
                doubled = max(self.panels[0] - fixed, 0)
            most = max(most, doubled * PANEL_BYTES + max(inputs + rest, read))
        return most

    def _k_size(self, layer: int) -> int:
        """K size of a layer's gemm. A operands from registers round it up to groups of 32 units."""
        if layer == 1 or (self.splits > 1 and layer < len(self.layers)):
            return 8 * self.panels[layer - 1]
        needed = -(-self.tiles[layer - 1] // (4 * WARPGROUPS))
        batches = -(-needed // 4)
        return 32 * WARPGROUPS * batches * -(-needed // batches)

    def _sent_rows(self, i: int) -> int:
        """Rows of layer i's weights in the exchange: inputs; for the output layer, also its bias."""
        return UNITS * self.tiles[i] + (i == len(self.layers) - 1)

    def _read_bytes(self, layer: int) -> int:
        """Shared memory of the input that the dW gemm reads."""
        panels = self.panels[layer - 1]
        return PANEL_BYTES * ((self.splits - 1 if layer > 1 else 0) * panels + round_up(panels, 8 * WARPGROUPS))

    # -- launches ------------------------------------------------------------------------------------------------

    def graphs_of(self, count: int) -> Sequence[int]:
        return (0,)  # one graph for any count

    def steps(self, count: int) -> Steps:
        moments = OPTIMISERS[self.training.optimiser]
        template = f"{self.splits}, {self.owned}, {self.rows}, {moments}, {template_codes(self)}"
        program = Program(SOURCE, f"train_layer_parallel<{template}>")
        sizes, layers = self.extra_memory(), []
        for i in range(len(self.layers)):
            names = ("frag_mean", "frag_square", "forward", "backward", "columns")
            layers.append(LayerBuffers.of(
                w=State(f"w{i}"), mean=state_if(moments > 0, f"mean{i}"), square=state_if(moments > 1, f"square{i}"),
                **{name: state_if(f"{name}{i}" in sizes, f"{name}{i}") for name in names},
            ))  # fmt: skip
        config = LaunchConfig(
            (self.blocks, self.networks, 1), (128 * WARPGROUPS, 1, 1), self.shared_bytes, cooperative=True
        )
        return Steps((KernelLaunch(program, config, (pack_args(ARGS, self, layers),), _BUDGET),))


def make_lowering(
    chain: Chain, training: TrainingStep, precision: str, batch: int, device: Device
) -> LayerParallelLowering | str:
    """Returns the lowering, or the reason for a refusal."""
    layers = find_layers(chain)
    if why := why_unsupported(training):
        return why
    if not training.byte_scale:
        return "only uint8 rows: integers below 256 times a scale"
    if not 2 <= len(layers) <= MAX_LAYERS:
        return f"2 to {MAX_LAYERS} layers, got {len(layers)}"
    if layers[-1].N > MAX_OUTPUTS:
        return f"at most {MAX_OUTPUTS} outputs, got {layers[-1].N}"
    if batch > ROWS:
        return f"batches of at most {ROWS} rows, got {batch:,}"
    rows = next(rows for rows in BATCHES if rows >= batch)
    most = MAX_UNITS // (1 if LayerParallelLowering(layers, training, precision, batch, device).splits == 1 else 2)
    if (widest := max(layer.N for layer in layers[:-1])) > most:
        return f"hidden layers of at most {most} units in {precision}, got {widest:,}"
    for owned in range(1, MAX_OWNED_TILES + 1):
        lowering = LayerParallelLowering(layers, training, precision, batch, device, owned=owned, rows=rows)
        if lowering.blocks > device.units:
            continue
        if not lowering.fits:
            return f"does not fit: {lowering.shared_bytes:,} B of shared memory, a block has {device.fast_bytes:,} B"
        if owned * lowering.splits > MAX_OWNED_TILES:
            break
        return lowering
    return f"more blocks than the {device.units} SMs"


class MlpTrainLayerParallelKernel(TrainKernel):
    name = "mlp_train_layer_parallel"
    architectures = ARCHITECTURES
    make_lowering = staticmethod(make_lowering)


def _step(
    precision: str, batch: int = 64, loss: str = "cross_entropy", optimiser: str = "sgd"
) -> tuple[TrainingStep, Job]:
    return TrainingStep(loss, optimiser, byte_scale=1 / 255), Job(precision, batch)


INSTANCES = (
    *(
        step_instance(f"digits {precision}", make_lowering, _step(precision), DIGITS, H200)
        for precision in ("fp32", "tf32", "bf16")
    ),
    *(
        step_instance(f"digits {precision}, 8 networks", make_lowering, _step(precision), DIGITS, H200, networks=8)
        for precision in ("fp32", "bf16")
    ),
    counting_instance(step_instance("digits fp32", make_lowering, _step("fp32"), DIGITS, H200)),
    step_instance("digits fp32, adam", make_lowering, _step("fp32", optimiser="adam"), DIGITS, H200),
    step_instance(
        "four layers, momentum", make_lowering, _step("bf16", 32, "mse", "momentum"), (20, 53, 29, 17, 5), H200
    ),
)
