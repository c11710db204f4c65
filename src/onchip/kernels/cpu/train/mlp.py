"""mlp_train on the CPU: forward, backward and update of a mini-batch step as one group.

Idea    A step is two parallel loops. In the first, every thread takes some rows of the batch through the
        whole network and back (rows do not need each other); in the second, every thread takes some pieces of
        the weight matrices, forms their gradient in registers and updates them on the spot, so a gradient
        never reaches memory. Steps follow one another inside one call. Of a large batch every thread takes whole
        blocks of rows instead, which stay in its cache from the way forward to the gradient.
Floor   A row costs 6 flop a weight, 4 in the first layer (nobody asks for the gradient of x). 784-320-160-10, batch
        64: 85 Mflop a step, 0.28 ms at 300 Gflop/s.
Same bits A weight's gradient is a sum over the rows of a block in order, SUM_ROWS at a time, and those of the blocks
        are added in order; how rows, blocks and pieces fall to threads changes no sum.
Limits  float32; an MLP chain of ReLU, LeakyReLU, Sigmoid, Tanh without softmax (cross_entropy takes logits); SGD,
        momentum, Adam, AdamW. A gradient that is clipped reaches memory: its norm is known when all of it is there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from onchip.kernels.chain import Chain, Dense, find_chain
from onchip.kernels.cpu.compiler.compile_ahead import announce
from onchip.kernels.cpu.compiler.jit import address, linked_below
from onchip.kernels.cpu.cost import CoreCost
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
    Crew,
    Model,
    data_words,
    places_of,
)  # fmt: skip
from onchip.kernels.cpu.train.step import (
    BLOCK,
    CREW_ROWS,
    finish_blocks,
    run_large_steps,
    run_losses,
    run_own_blocks,
    run_steps,
    run_steps_alone,
)
from onchip.kernels.cpu.train.weights import SUM_ROWS, TASK_FLOATS, TASK_K
from onchip.kernels.pointwise import TRAINED
from onchip.kernels.training import (
    STATE_NAMES,
    BatchRanks,
    Piece,
    Trained,
    check_restored,
    mean_losses,
    per_step_values,
    weights_of_batches,
    why_not_trained,
)
from onchip.network.graph import Network
from onchip.network.recipe import Array
from onchip.plan.device import Device
from onchip.plan.kernel import OPTIMISERS, Claim, Job, Refusal

LOSS_CODES = {"cross_entropy": CROSS_ENTROPY, "half_sse": HALF_SSE, "mse": MSE}
KINDS = {"sgd": SGD, "momentum": MOMENTUM, "adam": ADAM, "adamw": ADAM}
_ALONE_FLOP = 4e6  # of a step, 30 us of one core: with less, threads wait for each other longer than they work
_SHARE = 0.58  # of the device's rate: sums over few rows, and rows that are turned on the way
_CREW_WEIGHT_BYTES = 512 << 10
_CREW_BYTES = 32 << 20  # for gradients of blocks that wait to be added up
_LOSS_BLOCKS = 64  # whose losses are asked for at a time


class Trainer:
    """One training run: its data, its weights, and what its optimiser keeps."""

    def __init__(
        self, chain: Chain, job: Job, weights: dict[str, Array], x: Array, y: Array, row_weights: Array | None,
        threads: int | None, ranks: BatchRanks | None = None,
    ) -> None:  # fmt: skip
        """x (n, D_in) float32; y (n,) int64 classes or (n, D_out) float32 targets; row_weights (n,) float32, if they
        are not all 1. All are read where they lie.

        threads  None: on the calling thread, so that several trainers can run side by side
        ranks    that make gradients of some blocks of each batch, and have all of them then
        """
        is_alone = ranks is None and _is_small(chain, job)
        self.chain, self.threads, self.x, self.y, self.ranks = chain, None if is_alone else threads, x, y, ranks
        self.job, self.row_weights, self.loss_code = job, row_weights, LOSS_CODES[job.loss]
        self.steps_done, self.gpu_bytes = 0, 0
        w, bias = weights["w"], weights["bias"]
        workers, blocks = self.threads or 1, -(-job.batch // BLOCK)
        # Threads share a block, unless there are so many that all of them are busy with blocks of their own, and the
        # weights so few that they, their gradients and some rows stay in the cache of each.
        round_rows = workers * BLOCK
        has_few = job.batch < 4 * round_rows and job.batch % round_rows != 0
        self.shares_blocks = ranks is None and workers > 1 and (has_few or w.nbytes > _CREW_WEIGHT_BYTES)
        at_a_time = 0 if self.shares_blocks else min(blocks, max(workers, _CREW_BYTES // w.nbytes))
        wt = aligned_zeros(sum(packed_size(layer.D_out, layer.D_in) for layer in chain.layers[1:]))
        kept = OPTIMISERS[job.optimiser]
        vw, vb = (aligned_zeros(size if kept > 0 else 0) for size in (w.size, bias.size))
        sw, sb = (aligned_zeros(size if kept > 1 else 0) for size in (w.size, bias.size))
        gw, gb = (aligned_zeros(size if blocks > 1 or job.clip_norm else 0) for size in (w.size, bias.size))
        tasks = _tasks(chain)
        squares = np.zeros(len(tasks))
        self.model = Model(_train_table(chain, CREW_ROWS), tasks, w, bias, wt, vw, vb, sw, sb, gw, gb, squares)
        self._transpose_weights()
        counts = max(at_a_time, _LOSS_BLOCKS)
        self._blocks = [Block(*arrays) for arrays in zip(*_blocks(chain, CREW_ROWS, workers), strict=True)]
        self.crew = Crew(
            blocks=np.array([places_of(block).reshape(-1) for block in self._blocks]),
            gw=_aligned_rows(at_a_time, w.size),
            gb=_aligned_rows(at_a_time, bias.size),
            loss=np.zeros(counts),
            hit=np.zeros(counts, np.int64),
        )
        self._places = places_of(self.model), places_of(self.crew)
        if self.shares_blocks:
            rows = min(BLOCK, job.batch)
            self.shared_model = self.model._replace(table=_train_table(chain, rows))
            self.block = Block(*(array[0] for array in _blocks(chain, rows, 1)))
            self.tiles = _aligned_rows(workers, TASK_FLOATS)
            self._shared_places = places_of(self.shared_model), places_of(self.block)

    def train(self, piece: Piece) -> Trained:
        orders = zip(piece.orders, piece.lrs, strict=True)
        return [self._steps(order, lr, piece.momentum, piece.decay) for order, lr in orders]

    def _steps(self, order: Array, lr: float, momentum: float, decay: float) -> tuple[Array, Array]:
        weights = weights_of_batches(order, self.job.batch, self.row_weights)
        losses, correct = np.zeros(len(weights)), np.zeros(len(weights), np.int64)
        rules = per_step_values(self.job, self.chain.layers[-1].D_out, weights, self.steps_done, lr, momentum, decay)
        data = self._data(order)
        numbers = self.job.batch, self.loss_code, KINDS[self.job.optimiser], address(rules), len(weights)
        steps = address(data), *numbers, address(losses), address(correct)
        start_helpers(self.threads or 1)
        if self.ranks is not None:
            self._shared_steps(self.ranks, address(data), len(order), rules, losses, correct)
        elif self.threads is None:
            run_steps_alone(*map(address, self._places), *steps)
        elif self.shares_blocks:
            run_steps(*map(address, self._shared_places), *steps, address(self.tiles), self.threads)
        else:
            run_large_steps(*map(address, self._places), *steps, self.threads)
        self.steps_done += len(weights)
        return mean_losses(self.job.loss, losses, weights), correct

    def _data(self, order: Array) -> Array:
        return data_words(self.x, self.y, self.row_weights, self.job.label_smoothing, order)

    def _shared_steps(
        self, ranks: BatchRanks, data: int, rows: int, rules: Array, losses: Array, correct: Array
    ) -> None:
        """run_large_steps with the same bits, each rank making some of the blocks.

        data  the address of what `_data` gives, of so many rows
        """
        crew, batch, threads, kind = self.crew, self.job.batch, self.threads or 1, KINDS[self.job.optimiser]
        places, some = [*map(address, self._places)], len(crew.gw) * BLOCK
        for step in range(len(losses)):
            begin = step * batch
            size = min(batch, rows - begin)
            for start in range(0, size, some):
                blocks = -(-min(some, size - start) // BLOCK)
                cuts = [rank * blocks // ranks.size for rank in range(ranks.size + 1)]
                first, count = cuts[ranks.rank], cuts[ranks.rank + 1] - cuts[ranks.rank]
                run_own_blocks(*places, data, begin + start, size - start, self.loss_code, first, count, threads)
                ranks.exchange((crew.gw, crew.gb, crew.loss, crew.hit), cuts)
                is_first, is_last = start == 0, start + some >= size
                finish_blocks(*places, blocks, is_first, is_last, kind, address(rules), step, threads)
                for block in range(blocks):  # one after the other, as the compiled loops add them
                    losses[step] += crew.loss[block]
                    correct[step] += crew.hit[block]

    def evaluate(self, order: Array) -> tuple[float, int]:
        """The loss of the rows `order` of x as one batch, and how many of them hit their class."""
        loss, correct, data = np.zeros(1), np.zeros(1, np.int64), self._data(order)
        start_helpers(self.threads or 1)
        job = address(data), self.loss_code, address(loss), address(correct)
        run_losses(*map(address, self._places), *job, self.threads or 1)
        weight = weights_of_batches(order, max(1, len(order)), self.row_weights).sum(keepdims=True)
        return float(mean_losses(self.job.loss, loss, weight)[0]), int(correct[0])

    # -- weights and state by name ----------------------------------------------------------------------------

    def weights(self) -> dict[str, Array]:
        """The weights as the network names and shapes them."""
        return self._named(self.model.w, self.model.bias)

    def state(self) -> dict[str, Array]:
        """What the optimiser keeps: the number of steps, and numbers for each weight as '<kind>:<weight>'."""
        kept = {"steps": np.array([self.steps_done])}
        pairs = ((self.model.vw, self.model.vb), (self.model.sw, self.model.sb))
        for kind, (w, bias) in zip(STATE_NAMES[self.job.optimiser], pairs, strict=False):
            kept |= {f"{kind}:{name}": array for name, array in self._named(w, bias).items()}
        return kept

    def check(self, weights: Mapping[str, Array], state: Mapping[str, Array]) -> None:
        """FormatError if they are not the weights and the state of a run of this network."""
        check_restored(weights, state, self.weights(), self.state())

    def restore(self, weights: Mapping[str, Array], state: Mapping[str, Array]) -> None:
        """Go on from the weights and the state of another run of the same network."""
        self.check(weights, state)
        self._take(weights, "", self.model.w, self.model.bias)
        pairs = ((self.model.vw, self.model.vb), (self.model.sw, self.model.sb))
        for kind, (w, bias) in zip(STATE_NAMES[self.job.optimiser], pairs, strict=False):
            self._take(state, f"{kind}:", w, bias)
        self.steps_done = int(state["steps"][0])
        self._transpose_weights()

    def _layers(self) -> Iterator[tuple[Dense, slice, slice]]:
        """Each layer with its places in w and in bias."""
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
    """The arrays of a Block of `rows` rows, each with a row for every worker."""
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
    """(count, size) float32 zeros; every row begins on a cache line if it is no shorter than one."""
    across = -(-size // 16) * 16
    return aligned_zeros(count * across).reshape(count, across)


def _train_table(chain: Chain, rows: int) -> Array:
    """layer_table with, for each layer, its place in wt, its place in acts, and whether it has a bias."""
    table = np.zeros((len(chain.layers), 8), np.int64)
    table[:, :5] = layer_table(chain)
    wt = act = 0
    for i, layer in enumerate(chain.layers):
        table[i, COL_WT], table[i, COL_ACT], table[i, COL_HAS_BIAS] = wt, act, layer.bias is not None
        wt += packed_size(layer.D_out, layer.D_in) if i else 0
        act += rows * padded(layer.D_out)
    return table


def _tasks(chain: Chain) -> Array:
    """Pieces of the update: (layer, first column, first k, last k)."""
    return np.array(
        [
            (i, n, k, min(k + TASK_K, layer.D_in))
            for i, layer in enumerate(chain.layers)
            for n, _ in panels(layer.D_out)
            for k in range(0, layer.D_in, TASK_K)
        ],
        np.int64,
    )


def queue_training() -> None:
    """What all kinds of steps call is compiled on both cores, and counted, from the first function on."""
    announce(linked_below(run_steps)[:-1])


def _is_small(chain: Chain, job: Job) -> bool:
    """Whether one thread does a step sooner."""
    return job.batch * 6 * sum(layer.D_in * layer.D_out for layer in chain.layers) < _ALONE_FLOP


def _moved_bytes(chain: Chain, job: Job, cores: int) -> int:
    """What a step moves of the weights: each core reads all that some core has changed, on the way forward and, but
    for the first layer, back; an update reads and writes a weight, what its optimiser keeps, and its transposed copy.
    """
    sizes = [layer.D_in * layer.D_out for layer in chain.layers]
    update = 2 + 2 * OPTIMISERS[job.optimiser]
    return 4 * ((cores + update) * sum(sizes) + (cores + 1) * sum(sizes[1:]))


class MlpTrain:
    name = "mlp_train"
    device_kind = "cpu"
    precisions = ("fp32",)

    def claims(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim | Refusal]:
        if not job.is_training or start != 0:
            return
        chain = find_chain(net, 0, TRAINED)
        if refusal := why_not_trained(net, chain, job):
            yield Refusal(self.name, net.nodes[0].name, refusal)
            return
        assert chain is not None
        rows = min(CREW_ROWS, job.batch)  # that stay in a thread's cache
        cost = CoreCost(
            row_flop=3 * sum(map(net.row_flop, net.nodes)) - 2 * chain.layers[0].D_in * chain.layers[0].D_out,
            row_bytes=net.input.row_bytes,
            fixed_bytes=8 * net.parameters * (1 + OPTIMISERS[job.optimiser]),
            launches=0 if _is_small(chain, job) else 2,
            share=_SHARE,
            fixed_cache_bytes=_moved_bytes(chain, job, device.units),
            rows_per_core=job.batch if _is_small(chain, job) else 0,
        )
        fast = rows * (chain.widths[0] + 2 * sum(padded(width) for width in chain.widths[1:])) * 4
        yield Claim(
            self.name, f"mlp_train<{chain.label},{job.loss}>", chain.nodes, cost,
            why="forward, backward and update of a step in one call", recipes=packed_recipes(net, chain, 0),
            fast_bytes=fast, facts=chain,
            order=f"{ORDER}; gradients by rows in order, {SUM_ROWS} at a time, then blocks of {BLOCK}",
        )  # fmt: skip

    def trainer(
        self, claim: Claim, job: Job, weights: dict[str, Array], x: Array, y: Array, row_weights: Array | None,
        threads: int | None, ranks: BatchRanks | None = None,
    ) -> Trainer:  # fmt: skip
        assert isinstance(claim.facts, Chain)
        return Trainer(claim.facts, job, weights, x, y, row_weights, threads, ranks)
