"""mlp_train on the CPU: forward, backward and update of a mini-batch step as one group.

Idea    A step is two parallel loops. The first is over rows: a task runs some rows through the whole network, forward
        and backward. The second is over weight tiles: a task accumulates a tile's gradient in registers and updates
        the tile at once, so a gradient never reaches memory. All steps run in one call. For a large batch, a task is a
        whole block of rows, which stays in its core's cache from the forward pass to the gradient.
Floor   A row costs 6 flop per weight, 4 in the first layer (x needs no gradient). 784-320-160-10, batch 64: 85 Mflop
        per step, 0.28 ms at 300 Gflop/s.
Same bits A weight's gradient is a sum over the rows of a block in order, SUM_ROWS at a time, and blocks are added in
        order, however rows, blocks and tiles are assigned to threads.
Limits  float32; an MLP chain of ReLU, LeakyReLU, Sigmoid, Tanh without softmax (cross_entropy takes logits); SGD,
        momentum, Adam, AdamW. Clipped gradients are stored in memory: their norm needs all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from onchip.kernels.chain import Chain, Dense, find_chain
from onchip.kernels.cpu.compiler.compile_ahead import queue_functions
from onchip.kernels.cpu.compiler.jit import address, linked_below
from onchip.kernels.cpu.cost import CPU, CoreCost
from onchip.kernels.cpu.kernel import CpuKernel
from onchip.kernels.cpu.memory import aligned_zeros
from onchip.kernels.cpu.microkernels.packed_layers import layer_table, packed_recipes
from onchip.kernels.cpu.microkernels.tile import ORDER, PANEL, pack, packed_size, padded, panels, unpack
from onchip.kernels.cpu.threading.threads import start_helpers
from onchip.kernels.cpu.train.model import (
    ADAM,
    COL_ACT,
    COL_BIAS,
    COL_HAS_BIAS,
    COL_W,
    COL_WT,
    CROSS_ENTROPY,
    HALF_SSE,
    MOMENTUM,
    MSE,
    SGD,
    Block,
    Model,
    Scratch,
    data_fields,
    descriptors_of,
)  # fmt: skip
from onchip.kernels.cpu.train.phases import new_times, step_phases
from onchip.kernels.cpu.train.step import (
    BLOCK,
    WORKER_ROWS,
    finish_blocks,
    run_large_steps,
    run_losses,
    run_rank_blocks,
    run_steps,
    run_steps_single,
)
from onchip.kernels.cpu.train.weights import SUM_ROWS, TASK_FLOATS, TASK_K
from onchip.kernels.pointwise import TRAINED
from onchip.kernels.training import (
    STATE_NAMES,
    BatchRanks,
    Epochs,
    LaunchTime,
    Trained,
    mean_losses,
    per_step_values,
    weights_of_batches,
    why_not_trained,
)
from onchip.network.graph import Network
from onchip.network.recipe import Array
from onchip.network.training import OPTIMISERS, TrainingStep
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Job, Refusal

LOSS_CODES = {"cross_entropy": CROSS_ENTROPY, "half_sse": HALF_SSE, "mse": MSE}
KINDS = {"sgd": SGD, "momentum": MOMENTUM, "adam": ADAM, "adamw": ADAM}
SINGLE_THREAD_FLOP = 4e6  # per step, 30 us on one core: with less, threads wait longer than they compute
CACHED_WEIGHT_BYTES = 512 << 10
GRADIENT_BYTES = 32 << 20  # for the gradients of blocks before they are added
_LOSS_BLOCKS = 64  # blocks per evaluation loop


class MlpSteps:
    """The steps of one network: its data, its weights, and its optimiser state."""

    def __init__(
        self, chain: Chain, training: TrainingStep, batch: int, weights: dict[str, Array], x: Array, y: Array,
        row_weights: Array | None, threads: int | None, ranks: BatchRanks | None = None,
    ) -> None:  # fmt: skip
        """x (n, D_in) float32; y (n,) int64 classes or (n, D_out) float32 targets; row_weights (n,) float32, if they
        are not all 1. None is copied.

        threads  None: the calling thread, so that several trainers can run concurrently
        ranks    each computes the gradients of some blocks of every batch; they exchange them
        """
        is_single = ranks is None and _is_small(chain, batch)
        self.chain, self.threads, self.x, self.y, self.ranks = chain, None if is_single else threads, x, y, ranks
        self.training, self.batch, self.row_weights = training, batch, row_weights
        self.loss_code = LOSS_CODES[training.loss]
        self._times: Array | None = None  # None: no step is timed
        w, bias = weights["w"], weights["bias"]
        workers, blocks = self.threads or 1, -(-batch // BLOCK)
        # One block per thread if there are enough blocks for all, and if the weights, their gradients and some rows fit
        # each core's cache; else threads share a block.
        round_rows = workers * BLOCK
        has_few = batch < 4 * round_rows and batch % round_rows != 0
        self.shares_blocks = ranks is None and workers > 1 and (has_few or w.nbytes > CACHED_WEIGHT_BYTES)
        at_a_time = 0 if self.shares_blocks else min(blocks, max(workers, GRADIENT_BYTES // w.nbytes))
        wt = aligned_zeros(sum(packed_size(layer.D_out, layer.D_in) for layer in chain.layers[1:]))
        states = OPTIMISERS[training.optimiser]
        vw, vb = (aligned_zeros(size if states > 0 else 0) for size in (w.size, bias.size))
        sw, sb = (aligned_zeros(size if states > 1 else 0) for size in (w.size, bias.size))
        gw, gb = (aligned_zeros(size if blocks > 1 or training.clip_norm else 0) for size in (w.size, bias.size))
        tasks = _tasks(chain)
        squares = np.zeros(len(tasks))
        self.model = Model(_train_table(chain, WORKER_ROWS), tasks, w, bias, wt, vw, vb, sw, sb, gw, gb, squares)
        self._transpose_weights()
        counts = max(at_a_time, _LOSS_BLOCKS)
        self._blocks = [Block(*arrays) for arrays in zip(*_blocks(chain, WORKER_ROWS, workers), strict=True)]
        self.scratch = Scratch(
            blocks=np.array([descriptors_of(block).reshape(-1) for block in self._blocks]),
            gw=_aligned_rows(at_a_time, w.size),
            gb=_aligned_rows(at_a_time, bias.size),
            loss=np.zeros(counts),
            correct=np.zeros(counts, np.int64),
        )
        self._ptrs = descriptors_of(self.model), descriptors_of(self.scratch)
        if self.shares_blocks:
            rows = min(BLOCK, batch)
            self.shared_model = self.model._replace(table=_train_table(chain, rows))
            self.block = Block(*(array[0] for array in _blocks(chain, rows, 1)))
            self.tiles = _aligned_rows(workers, TASK_FLOATS)
            self._shared_ptrs = descriptors_of(self.shared_model), descriptors_of(self.block)

    def time_steps(self) -> None:
        """Record the phases of some of the next steps. Those that ranks share are not recorded."""
        self._times = new_times(self.threads or 1) if self.ranks is None else None

    def launch_times(self, name: str) -> tuple[LaunchTime, ...]:
        """The recorded steps, as a kernel of this name."""
        us, phases, busy = step_phases(self._times) if self._times is not None else (0.0, (), ())
        return (LaunchTime(name, 1.0, us, phases=phases, threads=busy),) if phases else ()

    def train(self, epochs: Epochs) -> Trained:
        trained, done = [], epochs.steps_done
        for order, lrs in zip(epochs.orders, epochs.lrs, strict=True):
            trained.append(self._steps(order, done, lrs, epochs.momentum, epochs.decay))
            done += len(lrs)
        return trained

    def _steps(self, order: Array, done: int, lrs: Array, momentum: float, decay: float) -> tuple[Array, Array]:
        weights = weights_of_batches(order, self.batch, self.row_weights)
        losses, correct = np.zeros(len(weights)), np.zeros(len(weights), np.int64)
        D_out = self.chain.layers[-1].D_out
        values = per_step_values(self.training, D_out, weights, done, lrs, momentum, decay)
        data = self._data(order)
        options = self.batch, self.loss_code, KINDS[self.training.optimiser], address(values), len(weights)
        times = address(self._times) if self._times is not None else 0
        steps = address(data), *options, address(losses), address(correct), times
        start_helpers(self.threads or 1)
        if self.ranks is not None:
            self._shared_steps(self.ranks, address(data), len(order), values, losses, correct)
        elif self.threads is None:
            run_steps_single(*map(address, self._ptrs), *steps)
        elif self.shares_blocks:
            run_steps(*map(address, self._shared_ptrs), *steps, address(self.tiles), self.threads)
        else:
            run_large_steps(*map(address, self._ptrs), *steps, self.threads)
        return mean_losses(self.training.loss, losses, weights), correct

    def _data(self, order: Array) -> Array:
        return data_fields(self.x, self.y, self.row_weights, self.training.label_smoothing, order)

    def _shared_steps(
        self, ranks: BatchRanks, data: int, rows: int, values: Array, losses: Array, correct: Array
    ) -> None:
        """run_large_steps with the same bits; each rank computes some of the blocks.

        data  address of `_data`'s result, of `rows` rows
        """
        scratch, batch, threads, kind = self.scratch, self.batch, self.threads or 1, KINDS[self.training.optimiser]
        ptrs, at_a_time = [*map(address, self._ptrs)], len(scratch.gw) * BLOCK
        for step in range(len(losses)):
            begin = step * batch
            size = min(batch, rows - begin)
            for start in range(0, size, at_a_time):
                blocks = -(-min(at_a_time, size - start) // BLOCK)
                cuts = [rank * blocks // ranks.size for rank in range(ranks.size + 1)]
                first, count = cuts[ranks.rank], cuts[ranks.rank + 1] - cuts[ranks.rank]
                run_rank_blocks(*ptrs, data, begin + start, size - start, self.loss_code, first, count, threads)
                ranks.exchange((scratch.gw, scratch.gb, scratch.loss, scratch.correct), cuts)
                is_first, is_last = start == 0, start + at_a_time >= size
                finish_blocks(*ptrs, blocks, is_first, is_last, kind, address(values), step, threads)
                for block in range(blocks):  # in order, as in the compiled loops
                    losses[step] += scratch.loss[block]
                    correct[step] += scratch.correct[block]

    def evaluate(self, order: Array) -> tuple[float, int]:
        """The loss of the rows `order` of x as one batch, and the number of correct predictions."""
        loss, correct, data = np.zeros(1), np.zeros(1, np.int64), self._data(order)
        start_helpers(self.threads or 1)
        job = address(data), self.loss_code, address(loss), address(correct)
        run_losses(*map(address, self._ptrs), *job, self.threads or 1)
        weight = weights_of_batches(order, max(1, len(order)), self.row_weights).sum(keepdims=True)
        return float(mean_losses(self.training.loss, loss, weight)[0]), int(correct[0])

    # -- weights and state by name ----------------------------------------------------------------------------

    def weights(self) -> dict[str, Array]:
        """The weights, with the network's names and shapes."""
        return self._named(self.model.w, self.model.bias)

    def moments(self) -> dict[str, Array]:
        """The optimiser state as '<kind>:<weight>'."""
        state = dict[str, Array]()
        pairs = ((self.model.vw, self.model.vb), (self.model.sw, self.model.sb))
        for kind, (w, bias) in zip(STATE_NAMES[self.training.optimiser], pairs, strict=False):
            state |= {f"{kind}:{name}": array for name, array in self._named(w, bias).items()}
        return state

    def write(self, weights: Mapping[str, Array], state: Mapping[str, Array]) -> None:
        """Continue from the weights and the state of another run of the same network."""
        self._take(weights, "", self.model.w, self.model.bias)
        pairs = ((self.model.vw, self.model.vb), (self.model.sw, self.model.sb))
        for kind, (w, bias) in zip(STATE_NAMES[self.training.optimiser], pairs, strict=False):
            self._take(state, f"{kind}:", w, bias)
        self._transpose_weights()

    def _layers(self) -> Iterator[tuple[Dense, slice, slice]]:
        """Each layer with its slices of w and bias."""
        for layer, row in zip(self.chain.layers, self.model.table, strict=True):
            size = packed_size(layer.D_in, layer.D_out)
            yield (
                layer,
                slice(row[COL_W], row[COL_W] + size),
                slice(row[COL_BIAS], row[COL_BIAS] + layer.D_out),
            )

    def _named(self, w: Array, bias: Array) -> dict[str, Array]:
        named: dict[str, Array] = {}
        for layer, in_w, in_bias in self._layers():
            named[layer.weight] = np.ascontiguousarray(unpack(w[in_w], layer.D_in, layer.D_out).T)
            if layer.bias:
                named[layer.bias] = bias[in_bias].copy()
        return named

    def _take(self, arrays: Mapping[str, Array], prefix: str, w: Array, bias: Array) -> None:
        for layer, in_w, in_bias in self._layers():
            pack(arrays[prefix + layer.weight].T, w[in_w])
            if layer.bias:
                bias[in_bias] = arrays[prefix + layer.bias]

    def _transpose_weights(self) -> None:
        for (layer, in_w, _), row in list(zip(self._layers(), self.model.table, strict=True))[1:]:
            K, N = layer.D_in, layer.D_out
            at = row[COL_WT]
            pack(unpack(self.model.w[in_w], K, N).T, self.model.wt[at : at + packed_size(N, K)])


def _blocks(chain: Chain, rows: int, workers: int) -> Block:
    """The arrays of a Block of `rows` rows, each with one row per worker."""
    size = sum(rows * padded(layer.D_out) for layer in chain.layers)
    return Block(
        x=_aligned_rows(workers, rows * chain.widths[0]),
        acts=_aligned_rows(workers, size),
        dzs=_aligned_rows(workers, size),
        losses=np.zeros((workers, rows)),
        correct=np.zeros((workers, rows), np.int64),
        zeros=_aligned_rows(workers, max(padded(width) for width in chain.widths) + PANEL),
        bias=_aligned_rows(workers, sum(padded(layer.D_out) for layer in chain.layers)),
    )


def _aligned_rows(count: int, size: int) -> Array:
    """(count, size) float32 zeros; rows are padded to whole cache lines."""
    padded_size = -(-size // 16) * 16
    return aligned_zeros(count * padded_size).reshape(count, padded_size)


def _train_table(chain: Chain, rows: int) -> Array:
    """layer_table with, per layer, its offsets in wt and acts, and whether it has a bias."""
    table = np.zeros((len(chain.layers), 8), np.int64)
    table[:, :5] = layer_table(chain)
    wt = act = 0
    for i, layer in enumerate(chain.layers):
        table[i, COL_WT], table[i, COL_ACT], table[i, COL_HAS_BIAS] = wt, act, layer.bias is not None
        wt += packed_size(layer.D_out, layer.D_in) if i else 0
        act += rows * padded(layer.D_out)
    return table


def _tasks(chain: Chain) -> Array:
    """The weight tiles of the update: (layer, first column, first k, last k)."""
    return np.array(
        [
            (i, n, k, min(k + TASK_K, layer.D_in))
            for i, layer in enumerate(chain.layers)
            for n, _ in panels(layer.D_out)
            for k in range(0, layer.D_in, TASK_K)
        ],
        np.int64,
    )


def _is_small(chain: Chain, batch: int) -> bool:
    """Whether one thread runs a step faster than several."""
    return batch * 6 * sum(layer.D_in * layer.D_out for layer in chain.layers) < SINGLE_THREAD_FLOP


def _moved_bytes(chain: Chain, optimiser: str, cores: int) -> int:
    """Bytes of weights that a step moves: each core reads the updated weights in the forward pass and, except for the
    first layer, the backward pass; an update reads and writes a weight, its optimiser state and its transposed copy.
    """
    sizes = [layer.D_in * layer.D_out for layer in chain.layers]
    update = 2 + 2 * OPTIMISERS[optimiser]
    return 4 * ((cores + update) * sum(sizes) + (cores + 1) * sum(sizes[1:]))


class MlpTrainKernel(CpuKernel):
    name = "mlp_train"
    runs_whole_steps = True

    def claims(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim | Refusal]:
        step, batch = net.trained, job.batch
        if step is None or start != 0:
            return
        of, training = step.network, step.how
        chain = find_chain(of, 0, TRAINED)
        if refusal := why_not_trained(step, chain):
            yield Refusal(self.name, net.nodes[0].name, refusal)
            return
        assert chain is not None
        rows = min(WORKER_ROWS, batch)  # in a core's cache
        cost = CoreCost(
            row_flop=3 * sum(map(of.row_flop, of.nodes)) - 2 * chain.layers[0].D_in * chain.layers[0].D_out,
            row_bytes=of.input.row_bytes,
            fixed_bytes=8 * of.parameters * (1 + OPTIMISERS[training.optimiser]),
            launches=0 if _is_small(chain, batch) else 2,
            share=CPU.train_share,
            fixed_cache_bytes=_moved_bytes(chain, training.optimiser, device.units),
            rows_per_core=batch if _is_small(chain, batch) else 0,
        )
        fast = rows * (chain.widths[0] + 2 * sum(padded(width) for width in chain.widths[1:])) * 4
        yield Claim(
            self.name, f"mlp_train<{chain.label},{training.loss}>", tuple(node.name for node in net.nodes), cost,
            why="forward, backward and update of a step in one call", recipes=packed_recipes(of, chain, 0),
            fast_bytes=fast, facts=chain,
            order=f"{ORDER}; gradients by rows in order, {SUM_ROWS} at a time, then blocks of {BLOCK}",
        )  # fmt: skip

    def queue_steps(self) -> None:
        """Queue the functions that all kinds of steps call, so that both processes compile and count them."""
        queue_functions(linked_below(run_steps)[:-1])

    def bind_steps(
        self, claim: Claim, training: TrainingStep, batch: int, weights: dict[str, Array], x: Array, y: Array,
        row_weights: Array | None, threads: int | None, ranks: BatchRanks | None = None,
    ) -> MlpSteps:  # fmt: skip
        assert isinstance(claim.facts, Chain)
        return MlpSteps(claim.facts, training, batch, weights, x, y, row_weights, threads, ranks)
