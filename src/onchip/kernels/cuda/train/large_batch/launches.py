"""Host side of train/large_batch/launches.cu: the launches of training steps, and their memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Self

import numpy as np

from onchip.kernels.chain import Chain, find_chain
from onchip.kernels.cuda.common.arguments import NOTHING, Argument, Int64, State, Struct, UInt32
from onchip.kernels.cuda.common.costs import costs_of
from onchip.kernels.cuda.common.precision import PRECISIONS
from onchip.kernels.cuda.common.program import Budget, Instance, KernelLaunch, LaunchConfig, Program, Steps
from onchip.kernels.cuda.common.training import ORDER, PROGRESS, ROW_WEIGHTS, STEP_CORRECT, STEP_LOSSES, STEP_VALUES
from onchip.kernels.cuda.train.kernel import TrainKernel, step_instance
from onchip.kernels.cuda.train.large_batch.bytes import MIN_BATCH, SPLIT_BUDGET, STAGE_K, ByteRows
from onchip.kernels.cuda.train.large_batch.rows import BUDGET as ROWS_BUDGET
from onchip.kernels.cuda.train.large_batch.rows import MIN_ROWS, RowsPass
from onchip.kernels.cuda.train.large_batch.stream import BUDGET as STREAM_BUDGET
from onchip.kernels.cuda.train.large_batch.stream import THREADS as STREAM_THREADS
from onchip.kernels.cuda.train.large_batch.stream import StreamPass
from onchip.kernels.cuda.train.large_batch.structs import (
    MAX_LAYERS,
    NO_TALLY,
    TALLY,
    ByteGradient,
    Head,
    LayerMemory,
    Layers,
    LayerSizes,
    Networks,
    RowLayer,
    RowLayers,
    RowMemory,
    Shape,
    Squares,
    Step,
    Warps,
    state_if,
)
from onchip.kernels.cuda.train.large_batch.tiling import Tiling, choose_tiling, gemm_clocks
from onchip.kernels.cuda.train.layer import find_layers, layer_specs, split_evenly
from onchip.kernels.cuda.train.phases import PHASES, step_phases, with_phase_clocks
from onchip.kernels.cuda.train.stored import MOMENTS, StoredMlp
from onchip.kernels.pointwise import TRAINED
from onchip.kernels.training import STEP_FLOATS, StepPhase, epochs_at_once, why_not_trained
from onchip.network.graph import Network
from onchip.network.recipe import Array
from onchip.network.training import LOSSES, OPTIMISERS, TrainingStep
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Cost, Job, Refusal

SOURCE = Path(__file__).parent / "launches.cu"
LARGE_SOURCE = Path(__file__).parent / "staged.cu"
THREADS, WARPS = 256, 8  # per block, as in train/large_batch/launches.cuh
HEAD_OUTPUTS = 32  # most outputs that the head computes itself, one lane each
FEW_ROWS, MANY_ROWS = 3, 32  # per SM: the head uses a block per row up to few, 8 lanes per row from many on
MAX_BATCH = 1 << 30  # rows
MAX_BLOCKS = (1 << 31) - 1  # per launch
MAX_NETWORKS = 16  # per launch: enough blocks to fill a GPU with a small batch
GRAPH_STEPS = 64  # per graph, at most
APPLY_SHARES, MANY_SLICES = 8, 16  # threads that add up many slices of four elements
_GEMM_BUDGETS = {2: Budget(registers=128), 4: Budget(registers=232)}  # by Tiling.R
_STAGED_BUDGET = Budget(registers=128, spill_bytes=24)  # loop invariants
_ROW_BUDGET = Budget(registers=64, spill_bytes=16)  # sm_80: across activation calls
_NO_OVERLAP = ("sm_80", "sm_86", "sm_89")


@dataclass(frozen=True)
class LargeBatchLowering(StoredMlp):
    """Launches of a training run. Memory is State by name, as of StoredMlp and of common/training.py, and in addition:

    without a rows_pass, dz<l> (row_count, width<l>): gradients by the pre-activations of layer l
    losses, correct (row_count,) per row
    parts<l> (slices, N, stride): split-K partial gradients, unless the dW epilogue updates the weights
    squares (blocks,) float64, with clipping: sums of squared gradients
    w_split, dz_split: the first layer's weights and dz as a bf16 split (bytes.cuh), for uint8 rows
    With several networks per launch these belong to the first; those of the next are `stride_bytes` further on. Rows
    and targets are shared.
    """

    def for_networks(self, count: int) -> Self:
        """The lowering for as many of `count` networks as one launch trains, with bit-identical results."""
        return replace(self, networks=split_evenly(count, MAX_NETWORKS))

    @property
    def has_own_head(self) -> bool:
        """Whether the head computes the last layer."""
        return self.layers[-1].N <= HEAD_OUTPUTS

    @cached_property
    def byte_rows(self) -> ByteRows | None:
        """The first layer's gemms, for uint8 rows and large batches. The head computes a single layer."""
        if not self.training.byte_scale or self.batch < MIN_BATCH or len(self.layers) == 1:
            return None
        layer = self.layers[0]
        return ByteRows(layer.terms, layer.N, self.training.byte_scale, self.precision, self.device.units)

    @cached_property
    def rows_pass(self) -> RowsPass | None:
        """All layers after the first in one launch, for narrow layers and many rows. Only for uint8 rows: the first
        layer's dz is stored as the split that its dW gemm reads."""
        rows_pass = RowsPass(tuple(layer.N for layer in self.layers), self.precision)
        has_many = self.batch > MIN_ROWS * self.device.units
        return rows_pass if self.byte_rows and has_many and rows_pass.fits(self.device.fast_bytes) else None

    @cached_property
    def stream_pass(self) -> StreamPass | None:
        """Same for wider layers, without their dW, if one launch per gemm would take longer.

        Also only for uint8 rows: the dW launch reads activations before griddepcontrol.wait, so it must not follow the
        launch that writes them.
        """
        if not self.byte_rows or self.rows_pass:
            return None
        device, layers, batch = self.device, self.layers, self.batch
        widths, costs = tuple(layer.N for layer in layers), costs_of(device).train_stream
        rows = StreamPass(widths, self.precision, batch, device.units, device.fast_bytes, costs=costs)
        if not rows.fits:
            return None
        gemms = [([(batch, layer.N)], layer.terms) for layer in layers[1 : len(layers) - self.has_own_head]]
        gemms += [([(batch, layer.D)], layer.N) for layer in layers[1 : len(layers) - self.has_own_head]]
        separate = sum(gemm_clocks(sizes, K, self.precision, device) for sizes, K in gemms)
        return rows if rows.clocks < separate + costs.separate_clocks else None

    @cached_property
    def tiling(self) -> Tiling:
        """Tiling of all layers' dW, except that of uint8 rows."""
        sizes = [(layer.N, layer.terms) for layer in self.layers[1 if self.byte_rows else 0 :]]
        return choose_tiling(sizes, self.batch, self.precision, self.device, can_slice=True)

    def slices(self, layer: int) -> int:
        """Split-K slices of a layer's dW; 0: the dW epilogue updates the weights, impossible with clipping."""
        if self.byte_rows and layer == 0:
            return self.byte_rows.slices(self.batch)
        if self.rows_pass:
            return self.rows_pass.blocks(self.batch, self.device.units)
        return self.tiling.slices if self.tiling.slices > 1 or self.training.clip_norm else 0

    @property
    def order(self) -> str:
        tiling = self.tiling
        gradients = f"split-K over {tiling.split_k} warps and {tiling.slices} slices of the batch"
        if self.rows_pass:
            gradients = f"steps of 16, {self.slices(1)} slices of the batch"
        if self._shares(self._sliced_layers, is_summed=bool(self.training.clip_norm)) > 1:
            gradients += f" in {APPLY_SHARES} shares"
        if self.byte_rows:
            first = f"{self.byte_rows.splits} bf16 splits, {self.slices(0)} slices of the batch"
            gradients += f"; first layer (uint8): {first}"
        others = "; other layers: steps of 16" if self.rows_pass or self.stream_pass else ""
        return f"chunks of 16 K elements{others}; gradients over rows: {gradients}"

    @property
    def why(self) -> str:
        launches = f"{self.launches_per_step} launches per step, many steps per graph; the dW gemms update the weights"
        return launches + ("; uint8 rows" if self.byte_rows else "")

    groups = 1  # of blocks that report losses of a step
    is_persistent = False  # one launch runs all steps; it counts clocks per phase on request (train/phases.py)

    @cached_property
    def launches_per_step(self) -> int:
        return len(self.steps(1).launches) - 1

    @property
    def step_us(self) -> float:
        """Estimated time per step, besides an empty kernel's per launch."""
        first, others = self._row_flop
        return self._us(self.launches_per_step, first, others)

    def launch_estimates(self, count: int) -> list[float]:
        """Estimated time of each launch of `steps(count)`: step_us split by the launches' flop. For one network."""
        launch_us = self.device.graph_launch_us or self.device.launch_us
        return [launch_us + self._us(1, *launch.row_flop) for launch in self.steps(count).launches]

    def _us(self, launches: int, first: int, others: int) -> float:
        """Estimated time of launches that compute this flop per row, of the first layer and of the others."""
        costs, precision, flop = costs_of(self.device).train_launches, self.precision, (first + others) * self.batch
        if self.batch < MIN_BATCH:
            return costs.few_rows_us * launches + costs.us_per_gflop[precision] * 1e-9 * flop
        us = costs.many_rows_us[precision] * launches + flop / self._flops * 1e6
        return us if self.byte_rows else us + costs.float_us_per_gflop * 1e-9 * first * self.batch

    @property
    def _flops(self) -> float:
        precision = "tf32" if self.precision == "fp32" else self.precision
        return costs_of(self.device).train_launches.shares[self.precision] * self.device.flops[precision]

    @property
    def _row_flop(self) -> tuple[int, int]:
        """Without the activations', of the first layer, which has no dx, and of the others."""
        first, *others = (layer.terms * layer.N for layer in self.layers)
        return 4 * first, 6 * sum(others)

    @property
    def fast_bytes(self) -> int:
        """Shared memory per block."""
        return self.tiling.shared_bytes

    def cost(self, net: Network) -> Cost:
        """Cost of a step."""
        first, precision = self.layers[0], self.precision
        return Cost(
            row_flop=3 * sum(map(net.row_flop, net.nodes)) - 2 * first.D * first.N,
            row_bytes=2 * (self.byte_rows.stride if self.byte_rows else net.input.row_bytes),
            fixed_bytes=8 * net.parameters * (1 + OPTIMISERS[self.training.optimiser]),
            launches=self.launches_per_step,
            rate=costs_of(self.device).train_launches.shares[precision],
            precision="tf32" if precision == "fp32" else "",
            min_us=self.step_us,
            why_slow="steps depend on each other",
        )

    # -- memory ----------------------------------------------------------------------------------------------------

    def memory(self, orders: Sequence[int], n: int) -> dict[str, int]:
        nbytes = dict[str, int]()
        for i, layer in enumerate(self.layers):
            nbytes[f"a{i}"] = 4 * self.row_count * self.width(i)
            if not self.rows_pass:
                nbytes[f"dz{i}"] = nbytes[f"a{i}"]
            for name in ("w", *MOMENTS[: OPTIMISERS[self.training.optimiser]]):
                nbytes[f"{name}{i}"] = 4 * layer.N * layer.stride
            if slices := self.slices(i):
                nbytes[f"parts{i}"] = slices * 4 * layer.N * layer.stride
        if byte_rows := self.byte_rows:
            for name, K in (("w_split", byte_rows.terms), ("dz_split", self.batch)):
                nbytes[name] = byte_rows.bytes_of_parts(K)
        if self.training.is_weighted:
            nbytes[ROW_WEIGHTS] = 4 * n
        nbytes |= self.extra_memory()
        nbytes |= {"losses": 8 * self.row_count, "correct": 4 * self.row_count, PROGRESS: 16}
        queued = max(epochs_at_once(rows, self.batch) * -(-rows // self.batch) for rows in orders)  # steps
        sums = 8 * max(queued * self.groups, -(-max(orders) // self.row_count))
        return nbytes | {
            STEP_VALUES: 4 * STEP_FLOATS * queued, STEP_LOSSES: sums, STEP_CORRECT: sums,
            ORDER: 8 * queued * self.batch,
        }  # fmt: skip

    def extra_memory(self) -> Mapping[str, int]:
        """Additional memory by name, in bytes."""
        return {"squares": 8 * sum(map(self._apply_blocks, range(len(self.layers))))} if self.training.clip_norm else {}

    # -- launches --------------------------------------------------------------------------------------------------

    def with_phase_clocks(self, steps: Steps) -> tuple[Steps, tuple[int, int]]:
        ((launch,), (across, down, _)) = steps.launches, steps.launches[0].config.grid
        return Steps((with_phase_clocks(launch),)), (across * down, 1 + len(PHASES))

    def phases(self, clocks: Array, us: float) -> tuple[StepPhase, ...]:
        return step_phases(clocks, us)

    def graphs_of(self, count: int) -> Sequence[int]:
        """Graph sizes that make up `count` steps; 0: one graph runs them all."""
        whole, rest = divmod(count, GRAPH_STEPS)
        return [GRAPH_STEPS] * whole + [rest] * (rest > 0)

    def steps(self, count: int) -> Steps:
        """`count` training steps, after the split of the initial weights, and the step counter."""
        launches = [launch for i in range(count) for launch in self._step(i)]
        if self.byte_rows:
            launches.insert(0, self._split_weights(self.byte_rows))
        return Steps((*launches, self._advance(count)))

    def losses(self) -> Steps:
        """Losses of the next rows, as one batch of `row_count`."""
        step, batch = self._step_struct(0, self.row_count), self.row_count
        forward = self._forward(step, batch)
        if self.byte_rows:
            forward.insert(0, self._split_weights(self.byte_rows))
        tally = self._launch_rows("train_tally", 1, step, TALLY)
        return Steps((*forward, self._head(step, batch, is_training=False), tally, self._advance(1)))

    def _step(self, index: int) -> list[KernelLaunch]:
        step, batch = self._step_struct(index, self.batch), self.batch
        if self.rows_pass:
            return [*self._forward(step, batch, 1), self._rows(self.rows_pass, step), *self._update(step)]
        if self.stream_pass:
            return [*self._forward(step, batch, 1), self._stream(self.stream_pass, step), *self._update(step)]
        last = len(self.layers) - (2 if self.has_own_head else 1)  # last layer with a backward launch
        backward = [self._backward(step, batch, layer) for layer in range(last, 0, -1)]
        return [*self._forward(step, batch), self._head(step, batch, is_training=True), *backward, *self._update(step)]

    def _step_struct(self, index: int, batch: int) -> Struct:
        return Step.of(
            progress=State("progress"), order=State("order"), per_step_values=State("per_step_values"), offset=index,
            batch=batch, networks=Networks.of(stride_bytes=self.stride_bytes),
        )  # fmt: skip

    def _flop(self, gemms: int, layers: Iterable[int]) -> tuple[int, int]:
        """KernelLaunch.row_flop of this many gemms of each of the layers."""
        sizes = {i: 2 * gemms * self.layers[i].terms * self.layers[i].N for i in layers}
        first = sizes.pop(0, 0)
        return first, sum(sizes.values())

    def _launch(
        self, program: Program, blocks: int, budget: Budget, shared: int, *arguments: Argument,
        row_flop: tuple[int, int] = (0, 0),
    ) -> KernelLaunch:  # fmt: skip
        config = LaunchConfig((blocks, self.networks, 1), (THREADS, 1, 1), shared, overlaps=self._overlaps)
        return KernelLaunch(program, config, arguments, budget, row_flop=row_flop)

    @property
    def _overlaps(self) -> bool:
        return self.device.arch not in _NO_OVERLAP

    def _launch_rows(
        self, kernel: str, blocks: int, *arguments: Argument, row_flop: tuple[int, int] = (0, 0)
    ) -> KernelLaunch:
        return self._launch(Program(SOURCE, kernel), blocks, _ROW_BUDGET, 0, *arguments, row_flop=row_flop)

    def _launch_gemm(
        self, pass_name: str, tiling: Tiling, blocks: int, *arguments: Argument, row_flop: tuple[int, int],
        more: str = "",
    ) -> KernelLaunch:  # fmt: skip
        """train_<pass_name> or, with staged operands, large_<pass_name>."""
        precision = PRECISIONS[self.precision].name
        if tiling.is_staged:
            program = Program(LARGE_SOURCE, f"large_{pass_name}<{precision}, {tiling.warps_m}, {tiling.warps_n}{more}>")
            return self._launch(program, blocks, _STAGED_BUDGET, tiling.shared_bytes, *arguments, row_flop=row_flop)
        program = Program(SOURCE, f"train_{pass_name}<{precision}, {tiling.R}{more}>")
        return self._launch(program, blocks, _GEMM_BUDGETS[tiling.R], 0, *arguments, row_flop=row_flop)

    def _advance(self, count: int) -> KernelLaunch:
        return self._launch_rows("train_advance", 1, Int64(self.stride_bytes), State("progress"), Int64(count))

    def _dz(self, layer: int) -> State | Int64:
        """dz buffer, or nullptr if train_rows computes dW itself."""
        return state_if(not self.rows_pass, f"dz{layer}")

    def _input(self, layer: int) -> State:
        return State(f"a{layer - 1}" if layer else "bytes" if self.byte_rows else "x")

    def _forward(self, step: Struct, batch: int, count: int | None = None) -> list[KernelLaunch]:
        """train_forward of every layer except the head's, or of the first `count`."""
        launches = []
        for i, layer in enumerate(self.layers[: count or len(self.layers) - self.has_own_head]):
            if self.byte_rows and i == 0:
                launches.append(self._forward_bytes(self.byte_rows, step, batch))
                continue
            tiling = choose_tiling([(batch, layer.N)], layer.terms, self.precision, self.device)
            strides = layer.stride, layer.stride, self.width(i)
            shape = _shape(strides, layer.terms, layer.N, not i, layer.activation, tiling.warps)
            memory = self._input(i), State(f"w{i}"), State(f"a{i}")
            blocks, flop = tiling.blocks(batch, layer.N), self._flop(1, [i])
            launches.append(self._launch_gemm("forward", tiling, blocks, step, *memory, shape, row_flop=flop))
        return launches

    def _forward_bytes(self, rows: ByteRows, step: Struct, batch: int) -> KernelLaunch:
        """bytes_forward of the first layer."""
        layer = self.layers[0]
        program, budget, shared = rows.forward_program(layer.activation[0])
        strides = rows.stride, layer.stride, self.width(0)
        shape = _shape(strides, layer.terms, layer.N, True, layer.activation, (4, 2, 1))
        scale = UInt32(int(np.float32(rows.scale).view(np.uint32)))
        arguments = step, self._input(0), State("w_split"), State("a0"), shape, scale
        blocks, flop = rows.forward_blocks(batch), self._flop(1, [0])
        return self._launch(program, blocks, budget, shared, *arguments, row_flop=flop)

    def _split_weights(self, rows: ByteRows) -> KernelLaunch:
        """bytes_split of the first layer's weights, before the first step of a graph; train_apply keeps it current."""
        layer, step = self.layers[0], self._step_struct(0, self.batch)
        return self._split(rows, step, ("w0", "w_split"), layer.stride, layer.terms, is_k_major=True)

    def _split(
        self, rows: ByteRows, step: Struct, names: tuple[str, str], stride: int, K: int, is_k_major: bool
    ) -> KernelLaunch:
        """bytes_split from names[0] (floats) to names[1] (split)."""
        blocks = rows.stages_of_split(K) * STAGE_K * 8 // THREADS
        sizes = UInt32(stride), UInt32(rows.N), UInt32(K)
        memory = State(names[0]), State(names[1])
        return self._launch(rows.split_program(is_k_major), blocks, SPLIT_BUDGET, 0, step, *memory, *sizes)

    def _backward(self, step: Struct, batch: int, i: int) -> KernelLaunch:
        """train_backward: from a layer's dz to that of the previous layer."""
        layer, previous = self.layers[i], self.layers[i - 1]
        tiling = choose_tiling([(batch, layer.D)], layer.N, self.precision, self.device)
        strides = self.width(i), layer.stride, layer.stride
        shape = _shape(strides, layer.N, layer.D, False, previous.activation, tiling.warps)
        memory = State(f"dz{i}"), State(f"w{i}"), State(f"a{i - 1}"), State(f"dz{i - 1}")
        blocks, flop = tiling.blocks(batch, layer.D), self._flop(1, [i])
        return self._launch_gemm("backward", tiling, blocks, step, *memory, shape, row_flop=flop)

    def _rows(self, rows: RowsPass, step: Struct) -> KernelLaunch:
        """train_rows: forward, loss, backward and dW of all layers but the first."""
        program, blocks = rows.program(LOSSES.index(self.training.loss), layer_specs(self.layers)), self.slices(1)
        arguments, flop = (step, self._row_layers(), State("dz_split")), self._flop(3, range(1, len(self.layers)))
        return self._launch(program, blocks, ROWS_BUDGET, rows.shared_bytes, *arguments, row_flop=flop)

    def _stream(self, rows: StreamPass, step: Struct) -> KernelLaunch:
        """train_stream: same without dW, for wider layers."""
        program = rows.program(LOSSES.index(self.training.loss), layer_specs(self.layers))
        config = LaunchConfig(
            (rows.blocks, self.networks, 1), (STREAM_THREADS, 1, 1), rows.shared_bytes, overlaps=self._overlaps
        )
        arguments, flop = (step, self._row_layers(), State("dz_split")), self._flop(2, range(1, len(self.layers)))
        return KernelLaunch(program, config, arguments, STREAM_BUDGET, row_flop=flop)

    def _row_layers(self) -> Struct:
        memory, layers = [], []
        for i, layer in enumerate(self.layers):
            code, slope = layer.activation
            memory.append(RowMemory.of(
                w=State(f"w{i}"), a=state_if(i + 1 < len(self.layers), f"a{i}"), dz=self._dz(i),
                partials=state_if(self.rows_pass is not None and i > 0, f"parts{i}"),
            ))  # fmt: skip
            layers.append(RowLayer.of(
                w_stride=layer.stride, stride=self.width(i), code=code, slope=slope, has_bias=layer.bias is not None,
                unused=0,
            ))  # fmt: skip
        return RowLayers.of(
            memory=memory, layer=layers, targets=State("targets"), losses=State("losses"), correct=State("correct"),
            weights=self._row_weights(), loss=LOSSES.index(self.training.loss), smoothing=self.training.label_smoothing,
        )  # fmt: skip

    def _row_weights(self) -> State | Int64:
        return state_if(self.training.is_weighted, "row_weights")

    def _head(self, step: Struct, batch: int, is_training: bool) -> KernelLaunch:
        last = len(self.layers) - 1
        layer, code, slope = self.layers[last], *self.layers[last].activation
        prev_code, prev_slope = self.layers[last - 1].activation if last else (0, 0)
        head = Head.of(
            a=self._input(last), w=state_if(self.has_own_head, f"w{last}"), z=State(f"a{last}"),
            targets=State("targets"), weights=self._row_weights(), dz=state_if(is_training, f"dz{last}"),
            prev_dz=state_if(is_training and self.has_own_head and last > 0, f"dz{last - 1}"),
            losses=State("losses"), correct=State("correct"), a_stride=layer.stride, w_stride=layer.stride,
            z_stride=self.width(last), K=layer.terms, N=layer.N, D=layer.D, is_gathered=last == 0,
            loss=LOSSES.index(self.training.loss), code=code, slope=slope, prev_code=prev_code, prev_slope=prev_slope,
            smoothing=self.training.label_smoothing,
        )  # fmt: skip
        warps, lanes = 1, 32  # per row
        if self.has_own_head and batch <= FEW_ROWS * self.device.units:
            warps = WARPS
        elif self.has_own_head and batch > MANY_ROWS * self.device.units:
            lanes = 8
        blocks = -(-batch * warps * lanes // THREADS)
        flop = self._flop(2 if is_training and last else 1, [last] if self.has_own_head else [])
        return self._launch_rows(f"train_head<{warps}, {lanes}>", blocks, step, head, row_flop=flop)

    def _update(self, step: Struct) -> Iterator[KernelLaunch]:
        """dW (train_gradients, or bytes_gradient for uint8 rows) unless train_rows computes it; then train_apply for
        slices, after train_squares with clipping. At most MAX_LAYERS per launch."""
        tiling, begin = self.tiling, 1 if self.byte_rows else 0
        has_update = not self.slices(len(self.layers) - 1)
        if self.byte_rows:
            yield from self._gradient_bytes(self.byte_rows, step)
        for first in range(begin, 0 if self.rows_pass else len(self.layers), MAX_LAYERS):
            indices = range(first, min(first + MAX_LAYERS, len(self.layers)))
            tally = TALLY if first == 0 else NO_TALLY  # the tally takes one more block
            blocks = [tiling.blocks(self.layers[i].N, self.layers[i].terms) for i in indices]
            blocks_n = [tiling.tile_columns(self.layers[i].terms) for i in indices]
            count = sum(blocks) * tiling.slices + (first == 0)
            layers = self._layers(indices, blocks, blocks_n)
            more = "".join(f", {str(each).lower()}" for each in (has_update, bool(self.byte_rows)))
            flop = self._flop(1, indices)
            yield self._launch_gemm("gradients", tiling, count, step, layers, tally, row_flop=flop, more=more)
        clips = bool(self.training.clip_norm)
        if clips:
            yield from self._apply("train_squares", step, len(self.layers))
        yield from self._apply("train_apply", step, self._sliced_layers, is_summed=clips)

    def _apply(self, kernel: str, step: Struct, layer_count: int, is_summed: bool = False) -> Iterator[KernelLaunch]:
        """Launches over the first layers' slices. is_summed: train_squares has added them up."""
        shares = self._shares(layer_count, is_summed) if kernel == "train_apply" else 1
        blocks = [self._apply_blocks(i, shares) for i in range(layer_count)]
        for first in range(0, layer_count, MAX_LAYERS):
            indices = range(first, min(first + MAX_LAYERS, layer_count))
            launch_blocks = blocks[first : indices.stop]
            layers = self._layers(indices, launch_blocks, [1] * len(launch_blocks), is_summed)
            block_sums = state_if(bool(self.training.clip_norm), "squares")
            squares = Squares.of(block_sums=block_sums, first=sum(blocks[:first]), count=sum(blocks))
            if kernel != "train_apply":
                yield self._launch_rows(kernel, sum(launch_blocks), step, layers, squares)
            elif self.byte_rows and first == 0:  # also writes the split of the first layer's weights
                stages = UInt32(-(-self.layers[0].terms // STAGE_K))
                name = f"train_apply<{self.byte_rows.splits}, {shares}>"
                yield self._launch_rows(name, sum(launch_blocks), step, layers, squares, State("w_split"), stages)
            else:
                name = f"train_apply<0, {shares}>"
                yield self._launch_rows(name, sum(launch_blocks), step, layers, squares, NOTHING, UInt32(0))

    @property
    def _sliced_layers(self) -> int:
        """Number of leading layers whose dW has slices for train_apply."""
        if self.slices(len(self.layers) - 1):
            return len(self.layers)
        return 1 if self.byte_rows else 0

    def _shares(self, layer_count: int, is_summed: bool) -> int:
        """Threads of train_apply that add up the slices of four elements."""
        most = 1 if is_summed else max(map(self.slices, range(layer_count)), default=1)
        return APPLY_SHARES if most >= MANY_SLICES else 1

    def _apply_blocks(self, layer: int, shares: int = 1) -> int:
        """Blocks per layer, four elements per thread."""
        return -(-self.layers[layer].N * self.layers[layer].stride * shares // (4 * THREADS))

    def _gradient_bytes(self, rows: ByteRows, step: Struct) -> list[KernelLaunch]:
        """bytes_gradient of the first layer, after the split of its dz unless rows_pass or stream_pass wrote it."""
        layer, batch, (program, budget, shared) = self.layers[0], self.batch, rows.gradient_program()
        gradient = ByteGradient.of(
            x=self._input(0), dz=State("dz_split"), partials=State("parts0"), x_stride=rows.stride,
            w_stride=layer.stride, K=layer.terms, N=layer.N, all_stages=2 * -(-batch // STAGE_K),
            slice_stages=rows.slice_stages(batch), scale=rows.scale,
        )  # fmt: skip
        blocks = 1 + self.slices(0) * rows.gradient_tiles
        flop = self._flop(1, [0])
        launch = self._launch(program, blocks, budget, shared, step, gradient, TALLY, row_flop=flop)
        if self.rows_pass or self.stream_pass:
            return [launch]
        return [self._split(rows, step, ("dz0", "dz_split"), self.width(0), batch, is_k_major=False), launch]

    def _layers(
        self, indices: range, blocks: Sequence[int], blocks_n: Sequence[int], is_summed: bool = False
    ) -> Struct:
        moments, memory, sizes = OPTIMISERS[self.training.optimiser], [], []  # moments identify the optimiser
        for i, blocks_of_layer in zip(indices, blocks_n, strict=True):
            layer, slices = self.layers[i], self.slices(i)
            memory.append(LayerMemory.of(
                w=State(f"w{i}"), mean=state_if(moments > 0, f"mean{i}"), square=state_if(moments > 1, f"square{i}"),
                a=self._input(i), dz=self._dz(i), partials=state_if(slices > 0, f"parts{i}"),
            ))  # fmt: skip
            sizes.append(LayerSizes.of(
                K=layer.terms, N=layer.N, w_stride=layer.stride, a_stride=layer.stride, dz_stride=self.width(i),
                is_gathered=i == 0, blocks_n=blocks_of_layer, slices=1 if is_summed else slices,
            ))  # fmt: skip
        first_blocks = [sum(blocks[:at]) for at in range(len(blocks))] + [MAX_BLOCKS] * (MAX_LAYERS - len(blocks))
        return Layers.of(
            memory=memory, blocks=sum(blocks), chunks=self.tiling.slice_chunks(self.batch), optimiser=moments,
            warps=_warps(self.tiling.warps), first_block=first_blocks, sizes=sizes,
        )  # fmt: skip


def _shape(
    strides: tuple[int, int, int], K: int, N: int, is_gathered: bool, activation: tuple[int, int],
    warps: tuple[int, int, int],
) -> Struct:  # fmt: skip
    (x_stride, w_stride, y_stride), (code, a) = strides, activation
    return Shape.of(
        x_stride=x_stride, w_stride=w_stride, y_stride=y_stride, K=K, N=N, is_gathered=is_gathered, code=code, a=a,
        warps=_warps(warps),
    )  # fmt: skip


def _warps(mnk: tuple[int, int, int]) -> Struct:
    m, n, k = mnk
    return Warps.of(m=m, n=n, k=k)


def make_lowering(
    chain: Chain, training: TrainingStep, precision: str, batch: int, device: Device
) -> LargeBatchLowering | str:
    """Returns the lowering, or the reason for a refusal."""
    if batch > MAX_BATCH:
        return f"batches of at most {MAX_BATCH:,} rows, got {batch:,}"
    return LargeBatchLowering(find_layers(chain), training, precision, batch, device)


class MlpTrainKernel(TrainKernel):
    name = "mlp_train"
    architectures = ()
    make_lowering = staticmethod(make_lowering)

    def claims(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim | Refusal]:
        step = net.trained
        if step and start == 0 and (why := why_not_trained(step, find_chain(step.network, 0, TRAINED))):
            yield Refusal(self.name, net.nodes[0].name, why)
        yield from super().claims(net, start, device, job)


# -- instances for make check-kernels ------------------------------------------------------------------------------

DIGITS, BACKPROP = (784, 320, 160, 10), (784, 56, 28, 10)


def _instance(name: str, kernel: str, step: tuple[TrainingStep, Job], *widths: int) -> Instance:
    return step_instance(name, make_lowering, step, widths, kernel=kernel)


def _step(precision: str, batch: int, byte_scale: float = 0.0, clip_norm: float = 0.0) -> tuple[TrainingStep, Job]:
    return TrainingStep("cross_entropy", clip_norm=clip_norm, byte_scale=byte_scale), Job(precision, batch)


INSTANCES = (
    tuple(
        _instance(f"{kernel} {precision}, {batch:,} rows", f"_{kernel}<", _step(precision, batch), *DIGITS)
        for batch, precisions in ((64, PRECISIONS), (4096, ("fp32", "bf16")), (16_384, ("tf32",)))
        for precision in precisions
        for kernel in ("forward", "backward", "gradients")
    )
    + tuple(
        _instance(
            f"bytes_{kernel} {precision}, {batch:,} rows", f"bytes_{kernel}<", _step(precision, batch, 1.0), *DIGITS
        )
        for batch, kernel in ((1024, "split"), (1024, "forward"), (1024, "gradient"))
        for precision in PRECISIONS
    )
    + tuple(
        _instance(kernel, f"_{kernel}", _step("fp32", 60_000, 1.0), *BACKPROP)
        for kernel in ("rows", "apply", "advance")
    )
    + tuple(
        _instance(f"gradients {precision}, after bytes_gradient", "_gradients<", _step(precision, 4096, 1.0), *DIGITS)
        for precision in ("fp32", "bf16")
    )
    + tuple(
        _instance(f"stream {precision}, {batch:,} rows", "_stream", _step(precision, batch, 1.0), *DIGITS)
        for precision, batch in (("fp32", 4096), ("fp32", 1024), ("tf32", 4096), ("bf16", 1024))
    )
    + (_instance("squares", "_squares", _step("fp32", 64, clip_norm=1.0), *DIGITS),)
    + tuple(_instance(f"head, {batch:,} rows", "_head", _step("fp32", batch), *DIGITS) for batch in (64, 1024, 16_384))
)
