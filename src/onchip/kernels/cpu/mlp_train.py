"""mlp_train on the CPU: forward, backward and update of a mini-batch step as one group.

Idea    A step is two parallel loops. In the first, every thread takes some rows of the batch through the
        whole network and back (rows do not need each other); in the second, every thread takes some tiles of
        the weight matrices, forms their gradient in registers and updates them on the spot, so a gradient
        never reaches memory. Steps follow one another inside one call.
Floor   A row costs 6 flop a weight, 4 in the first layer (nobody asks for the gradient of x). 784-320-160-10, batch
        64: 85 Mflop a step, 0.28 ms at 300 Gflop/s.
Same bits A weight's gradient is one sum over the batch in order; how rows and tiles fall to threads changes
        no sum. Batches beyond BLOCK rows go through block by block, their gradients added in order.
Limits  float32; an MLP chain without softmax (cross_entropy takes logits); SGD with momentum.
"""

from __future__ import annotations

from collections.abc import Iterator

import numba
import numpy as np

from onchip.kernels.chain import Chain, find_chain, why_not_float32
from onchip.kernels.cpu.jit import LAUNCH, use_threads
from onchip.kernels.cpu.mlp_fused import layer_table, packed_recipes
from onchip.kernels.cpu.tile import PANEL, TILE_FLOATS, aligned_zeros, pack, packed_size, padded, panels, unpack
from onchip.kernels.cpu.train_step import (
    BLOCK,
    COL_ACT,
    COL_BIAS,
    COL_HAS_BIAS,
    COL_W,
    COL_WT,
    CROSS_ENTROPY,
    HALF_SSE,
    Block,
    Data,
    Model,
    run_steps,
)  # fmt: skip
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Job, Price, Refusal
from onchip.spec.network import Network
from onchip.spec.recipe import Array

TASK_K = 64  # rows of a weight matrix in one piece of the update
LOSS_CODES = {"cross_entropy": CROSS_ENTROPY, "half_sse": HALF_SSE}
_NO_CLASSES, _NO_TARGETS = np.zeros(0, np.int64), np.zeros((0, 0), np.float32)


class Trainer:
    """The state of one training run."""

    def __init__(self, chain: Chain, job: Job, weights: dict[str, Array], threads: int) -> None:
        self.chain, self.threads = chain, threads
        self.batch, self.loss_code = job.batch, LOSS_CODES[job.loss]
        rows = min(BLOCK, job.batch)
        table = _train_table(chain, rows)
        w, bias = weights["w"], weights["bias"]
        wt = aligned_zeros(sum(packed_size(layer.D_out, layer.D_in) for layer in chain.layers[1:]))
        for layer, row in list(zip(chain.layers, table, strict=True))[1:]:
            K, N = layer.D_in, layer.D_out
            w_kn = unpack(w[row[COL_W] : row[COL_W] + packed_size(K, N)], K, N)
            pack(w_kn.T, wt[row[COL_WT] : row[COL_WT] + packed_size(N, K)])
        gw = aligned_zeros(w.size if job.batch > BLOCK else 0)
        vw, vb, gb = aligned_zeros(w.size), aligned_zeros(bias.size), aligned_zeros(bias.size)
        self.model = Model(table, _tasks(chain), w, bias, wt, vw, vb, gw, gb)
        size = sum(rows * padded(layer.D_out) for layer in chain.layers)
        self.block = Block(
            x=aligned_zeros(rows * chain.widths[0]),
            acts=aligned_zeros(size),
            dzs=aligned_zeros(size),
            losses=np.zeros(rows),
            zeros=aligned_zeros(max(padded(width) for width in chain.widths) + PANEL),
            tiles=aligned_zeros(numba.config.NUMBA_NUM_THREADS * TILE_FLOATS),
            tickets=aligned_zeros(1, np.int64),
        )

    def steps(self, x: Array, y: Array, order: Array, lr: float, momentum: float) -> Array:
        """Train on the rows `order` of x, batch by batch; the loss of each step before its update.

        x (n, D_in) float32; y (n,) int64 classes or (n, D_out) float32 targets
        """
        losses = np.zeros(-(-len(order) // self.batch))
        classes, targets = (y, _NO_TARGETS) if self.loss_code == CROSS_ENTROPY else (_NO_CLASSES, y)
        data = Data(x, classes, targets, order)
        with LAUNCH:
            use_threads(self.threads)
            lr32, momentum32 = np.float32(lr), np.float32(momentum)
            run_steps(self.model, self.block, data, self.batch, self.loss_code, lr32, momentum32, losses, self.threads)
        return losses

    def weights(self) -> dict[str, Array]:
        """The weights as the network names and shapes them."""
        named: dict[str, Array] = {}
        for layer, row in zip(self.chain.layers, self.model.table, strict=True):
            K, N = layer.D_in, layer.D_out
            packed = self.model.w[row[COL_W] : row[COL_W] + packed_size(K, N)]
            named[layer.weight] = np.ascontiguousarray(unpack(packed, K, N).T)
            if layer.bias:
                named[layer.bias] = self.model.bias[row[COL_BIAS] : row[COL_BIAS] + N].copy()
        return named


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


class MlpTrain:
    name = "mlp_train"
    device_kind = "cpu"
    precisions = ("fp32",)

    def claims(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim | Refusal]:
        if not job.is_training or start != 0:
            return
        chain = find_chain(net, 0)
        if refusal := self._refuse(net, chain, job):
            yield Refusal(self.name, net.nodes[0].name, refusal)
            return
        assert chain is not None
        rows = min(BLOCK, job.batch)
        price = Price(
            row_flop=3 * sum(map(net.row_flop, net.nodes)) - 2 * chain.layers[0].D_in * chain.layers[0].D_out,
            row_bytes=net.input.row_bytes,
            fixed_bytes=8 * net.parameters * (2 if job.momentum else 1),
            launches=2,
        )
        fast = rows * (chain.widths[0] + 2 * sum(padded(width) for width in chain.widths[1:])) * 4
        yield Claim(
            self.name, f"mlp_train<{chain.label},{job.loss}>", chain.nodes, price,
            why="forward, backward and update of a step in one call", recipes=packed_recipes(net, chain),
            fast_bytes=fast, facts=chain,
        )  # fmt: skip

    def _refuse(self, net: Network, chain: Chain | None, job: Job) -> str:
        if chain is None or len(chain.nodes) != len(net.nodes):
            return "trains a whole MLP chain: Linear layers with activations between them"
        if chain.normaliser:
            return f"{job.loss} takes the values before {chain.normaliser}: train without it"
        if chain.vectors != 1:
            return f"one vector a row, got {chain.vectors}"
        if job.loss == "cross_entropy" and chain.layers[-1].activation is not None:
            return f"cross_entropy takes logits, got {chain.layers[-1].activation_name} behind the last layer"
        names = [name for layer in chain.layers for name in (layer.weight, layer.bias) if name is not None]
        shared = len(set(names)) != len(names)
        return "every layer must have weights of its own" if shared else why_not_float32(net, chain)

    def trainer(self, claim: Claim, job: Job, weights: dict[str, Array], threads: int) -> Trainer:
        assert isinstance(claim.facts, Chain)
        return Trainer(claim.facts, job, weights, threads)
