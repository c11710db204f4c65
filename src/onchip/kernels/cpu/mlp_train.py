"""mlp_train on the CPU: forward, backward and update of a mini-batch step as one group.

Idea    A step is two parallel loops. In the first, every thread takes some rows of the batch through the
        whole network and back (rows do not need each other); in the second, every thread takes some tiles of
        the weight matrices, forms their gradient in registers and updates them on the spot, so a gradient
        never reaches memory. Steps follow one another inside one call.
Floor   6 * params flop a row. 784-320-160-10, batch 64: 85 Mflop a step, 0.32 ms at 270 Gflop/s.
Same bits A weight's gradient is one sum over the batch in order; how rows and tiles fall to threads changes
        no sum. Batches beyond BLOCK rows go through block by block, their gradients added in order.
Limits  float32; an MLP chain without softmax (cross_entropy takes logits); SGD with momentum.
"""

from __future__ import annotations

from collections.abc import Iterator

import numba
import numpy as np

from onchip.kernels.chain import Chain, find_chain
from onchip.kernels.cpu.activation import RELU, SIGMOID, TANH, activate, expm1_exp
from onchip.kernels.cpu.dense import dense
from onchip.kernels.cpu.jit import LAUNCH, compiled
from onchip.kernels.cpu.mlp_fused import layer_table, packed_recipes, padded_width, refuse_dtype
from onchip.kernels.cpu.tile import LANES, PANEL, ROWS, aligned_zeros, multiply_tile, pack, packed_size, padded, unpack
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Job, Price, Refusal
from onchip.spec.network import Network
from onchip.spec.recipe import Array

BLOCK = 256  # rows of a batch that go through together
TASK_K = 64  # rows of a weight matrix in one piece of the update
CROSS_ENTROPY, HALF_SSE = 0, 1
LOSS_CODES = {"cross_entropy": CROSS_ENTROPY, "half_sse": HALF_SSE}

# Columns of the table: one row a layer.
_K, _N, _W, _BIAS, _CODE, _WT, _ACT, _HAS_BIAS = range(8)
_ROWS, _PANEL, _LANES = ROWS, PANEL, LANES
_ZERO, _ONE, _NO_FLOOR = np.float32(0), np.float32(1), np.float32(-np.inf)


@compiled()
def _loss_rows(
    z: Array, dz: Array, count: int, N: int, stride: int, code: int, rows: Array, classes: Array, targets: Array, losses: Array
) -> None:
    """Loss of each row and its gradient by the output, into losses and dz; columns past N become 0."""
    for r in range(count):
        out, grad = z[r * stride : (r + 1) * stride], dz[r * stride : (r + 1) * stride]
        grad[N:] = _ZERO
        if code == CROSS_ENTROPY:
            highest = out[0]
            for n in range(1, N):
                highest = max(highest, out[n])
            total = _ZERO
            for n in range(N):
                _, e = expm1_exp(out[n] - highest)
                grad[n] = e
                total += e
            for n in range(N):
                grad[n] = grad[n] / total
            truth = classes[rows[r]]
            grad[truth] -= _ONE
            losses[r] = np.log(np.float64(total)) - np.float64(out[truth] - highest)
        else:
            target = targets[rows[r]]
            loss = 0.0
            for n in range(N):
                difference = out[n] - target[n]
                loss += 0.5 * np.float64(difference) * np.float64(difference)
                grad[n] = difference
            losses[r] = loss


@compiled()
def _through_activation(dz: Array, a: Array, count: int, N: int, stride: int, code: int) -> None:
    """dz *= f'(.), written by the activation's own output a."""
    for i in range(count):
        grad, out = dz[i * stride : i * stride + N], a[i * stride : i * stride + N]
        if code == RELU:
            for n in range(N):
                grad[n] = grad[n] if out[n] > _ZERO else _ZERO
        elif code == SIGMOID:
            for n in range(N):
                grad[n] = grad[n] * out[n] * (_ONE - out[n])
        elif code == TANH:
            for n in range(N):
                grad[n] = grad[n] * (_ONE - out[n] * out[n])


@compiled()
def _rows_pass(
    first: int, count: int, rows: Array, x: Array, classes: Array, targets: Array, table: Array, w: Array, bias: Array,
    wt: Array, xb: Array, acts: Array, dzs: Array, zeros: Array, loss_code: int, losses: Array,
) -> None:  # fmt: skip
    """Rows first..first+count of the block: gather, forward, loss, backward down to every layer's dz."""
    L, K0 = len(table), table[0, _K]
    for r in range(first, first + count):
        xb[r * K0 : (r + 1) * K0] = x[rows[r]]
    src, src_row = xb.ctypes.data + first * K0 * 4, K0 * 4
    for layer in range(L):
        K, N, code = table[layer, _K], table[layer, _N], table[layer, _CODE]
        width = padded_width(N)
        begin = table[layer, _ACT] + first * width
        dst = acts.ctypes.data + begin * 4
        dense(
            src, src_row, count, w.ctypes.data + table[layer, _W] * 4, K, width, bias.ctypes.data + table[layer, _BIAS] * 4,
            dst, width * 4, _ZERO if code == RELU else _NO_FLOOR,
        )  # fmt: skip
        if code > RELU:
            activate(acts[begin : begin + count * width], count, N, width, code)
        src, src_row = dst, width * 4
    for layer in range(L - 1, -1, -1):
        N, code = table[layer, _N], table[layer, _CODE]
        width = padded_width(N)
        begin = table[layer, _ACT] + first * width
        a, dz = acts[begin : begin + count * width], dzs[begin : begin + count * width]
        if layer == L - 1:
            _loss_rows(a, dz, count, N, width, loss_code, rows[first:], classes, targets, losses[first:])
        else:
            above = padded_width(table[layer + 1, _N])
            dense(
                dzs.ctypes.data + (table[layer + 1, _ACT] + first * above) * 4, above * 4, count,
                wt.ctypes.data + table[layer + 1, _WT] * 4, table[layer + 1, _N], width, zeros.ctypes.data,
                dz.ctypes.data, width * 4, _NO_FLOOR,
            )  # fmt: skip
        _through_activation(dz, a, count, N, width, code)


@compiled()
def _weights_pass(
    layer: int, n: int, k_first: int, k_last: int, rows: int, is_first: bool, is_last: bool, table: Array, w: Array, bias: Array,
    wt: Array, vw: Array, vb: Array, gw: Array, gb: Array, xb: Array, acts: Array, dzs: Array, zeros: Array, tile: Array,
    lr: np.float32, momentum: np.float32, scale: np.float32,
) -> None:  # fmt: skip
    """Gradient of w[k_first:k_last, n:n+panel] over the block's rows; in the last block also the update."""
    K, N = table[layer, _K], table[layer, _N]
    N_padded = padded_width(N)
    wide = n + _PANEL <= N_padded
    width = _PANEL if wide else _LANES
    dz = dzs.ctypes.data + (table[layer, _ACT] + n) * 4
    if layer == 0:
        a, a_k = xb.ctypes.data, K * 4
    else:
        a_k = padded_width(K) * 4
        a = acts.ctypes.data + table[layer - 1, _ACT] * 4
    panel = table[layer, _W] + n * K
    alone = is_first and is_last
    for k in range(k_first, k_last, _ROWS):
        count = min(_ROWS, k_last - k)
        at = panel + k * width
        out = tile.ctypes.data if alone else gw.ctypes.data + at * 4
        for r in range(0, count, _ROWS if count == _ROWS else 1):
            init, init_row = (zeros.ctypes.data, 0) if is_first else (out + r * width * 4, width * 4)
            if count == _ROWS and wide:
                multiply_tile(a + k * 4, 4, a_k, dz, N_padded * 4, init, init_row, out, width * 4, rows, _NO_FLOOR, ROWS, 2)
            elif count == _ROWS:
                multiply_tile(a + k * 4, 4, a_k, dz, N_padded * 4, init, init_row, out, width * 4, rows, _NO_FLOOR, ROWS, 1)
            elif wide:
                multiply_tile(a + (k + r) * 4, 4, a_k, dz, N_padded * 4, init, 0, out + r * width * 4, 0, rows, _NO_FLOOR, 1, 2)
            else:
                multiply_tile(a + (k + r) * 4, 4, a_k, dz, N_padded * 4, init, 0, out + r * width * 4, 0, rows, _NO_FLOOR, 1, 1)
        if is_last:
            grads = tile if alone else gw[at : at + count * width]
            _update(w[at : at + count * width], vw[at : at + count * width], grads, count * width, lr, momentum, scale)
            if layer > 0:
                _transpose(w[at : at + count * width], wt, table[layer, _WT], K, N, k, n, count, width)
    if k_first == 0 and table[layer, _HAS_BIAS]:
        begin = table[layer, _BIAS] + n
        sums = gb[begin : begin + width]
        if is_first:
            sums[:] = _ZERO
        for r in range(rows):
            row = dzs[table[layer, _ACT] + r * N_padded + n : table[layer, _ACT] + r * N_padded + n + width]
            for j in range(width):
                sums[j] += row[j]
        if is_last:
            _update(bias[begin : begin + width], vb[begin : begin + width], sums, width, lr, momentum, scale)


@compiled()
def _update(w: Array, v: Array, g: Array, size: int, lr: np.float32, momentum: np.float32, scale: np.float32) -> None:
    """v = momentum v + scale g; w -= lr v."""
    if momentum == _ZERO:
        for i in range(size):
            w[i] -= lr * (scale * g[i])
    else:
        for i in range(size):
            v[i] = momentum * v[i] + scale * g[i]
            w[i] -= lr * v[i]


@compiled()
def _transpose(tile: Array, wt: Array, wt_begin: int, K: int, N: int, k: int, n: int, count: int, width: int) -> None:
    """Keep the transposed copy of w[k:k+count, n:n+width] in step: the backward pass reads w by columns."""
    start = k // _PANEL * _PANEL
    across = min(_PANEL, padded_width(K) - start)
    for j in range(min(width, N - n)):
        at = wt_begin + start * N + (n + j) * across + (k - start)
        for r in range(count):
            wt[at + r] = tile[r * width + j]


@compiled(parallel=True)
def _steps(
    x: Array, classes: Array, targets: Array, order: Array, batch: int, loss_code: int, table: Array, tasks: Array,
    w: Array, bias: Array, wt: Array, vw: Array, vb: Array, gw: Array, gb: Array, xb: Array, acts: Array, dzs: Array,
    zeros: Array, tiles: Array, row_losses: Array, lr: np.float32, momentum: np.float32, mean: bool, losses: Array, threads: int,
) -> None:  # fmt: skip
    """One step a batch of `order`; the last batch may be short. losses gets a number a step."""
    for step in range(len(losses)):
        begin = step * batch
        size = min(batch, len(order) - begin)
        scale = np.float32(1.0 / size) if mean else _ONE
        total = 0.0
        for block in range(0, size, BLOCK):
            rows = order[begin + block : begin + min(size, block + BLOCK)]
            count = len(rows)
            is_first, is_last = block == 0, block + BLOCK >= size
            share = (count + threads - 1) // threads
            share = (share + _ROWS - 1) // _ROWS * _ROWS
            for part in numba.prange((count + share - 1) // share):
                first = part * share
                _rows_pass(
                    first, min(share, count - first), rows, x, classes, targets, table, w, bias, wt, xb, acts, dzs, zeros,
                    loss_code, row_losses,
                )  # fmt: skip
            for t in numba.prange(len(tasks)):
                _weights_pass(
                    tasks[t, 0], tasks[t, 1], tasks[t, 2], tasks[t, 3], count, is_first, is_last, table, w, bias, wt, vw, vb,
                    gw, gb, xb, acts, dzs, zeros, tiles[numba.get_thread_id()], lr, momentum, scale,
                )  # fmt: skip
            for r in range(count):
                total += row_losses[r]
        losses[step] = total / size if mean else total


class Trainer:
    """The state of one training run: packed weights, velocities, and the buffers of a block."""

    def __init__(self, chain: Chain, job: Job, weights: dict[str, Array], threads: int) -> None:
        self.chain, self.threads = chain, threads
        self.loss_code, self.mean = LOSS_CODES[job.loss], job.loss == "cross_entropy"
        self.w, self.bias = weights["w"], weights["bias"]
        self.table = _train_table(chain)
        self.tasks = _tasks(chain)
        self.wt = aligned_zeros(sum(packed_size(layer.D_out, layer.D_in) for layer in chain.layers[1:]))
        for layer, row in list(zip(chain.layers, self.table, strict=True))[1:]:
            K, N = layer.D_in, layer.D_out
            w_kn = unpack(self.w[row[_W] : row[_W] + packed_size(K, N)], K, N)
            pack(w_kn.T, self.wt[row[_WT] : row[_WT] + packed_size(N, K)])
        self.vw, self.vb = aligned_zeros(self.w.size), aligned_zeros(self.bias.size)
        rows = min(BLOCK, max(1, job.batch))
        split = job.batch > BLOCK  # only then do gradients wait in memory for the next block
        self.gw, self.gb = aligned_zeros(self.w.size if split else 0), aligned_zeros(self.bias.size)
        self.xb = aligned_zeros(rows * chain.widths[0])
        size = sum(rows * padded(layer.D_out) for layer in chain.layers)
        self.acts, self.dzs = aligned_zeros(size), aligned_zeros(size)
        self.table[:, _ACT] *= rows
        self.zeros = aligned_zeros(max(padded(width) for width in chain.widths) + PANEL)
        self.tiles = aligned_zeros(numba.config.NUMBA_NUM_THREADS * ROWS * PANEL).reshape(-1, ROWS * PANEL)
        self.row_losses = np.zeros(rows)
        self.batch = job.batch

    def steps(self, x: Array, y: Array, order: Array, lr: float, momentum: float) -> Array:
        """Train on the rows `order` of x, batch by batch; the loss of each step before its update.

        x (n, D_in) float32; y (n,) int64 classes or (n, D_out) float32 targets
        """
        losses = np.zeros(-(-len(order) // self.batch))
        classes, targets = (y, _NO_TARGETS) if self.loss_code == CROSS_ENTROPY else (_NO_CLASSES, y)
        with LAUNCH:
            numba.set_num_threads(self.threads)
            _steps(
                x, classes, targets, order, self.batch, self.loss_code, self.table, self.tasks, self.w, self.bias, self.wt,
                self.vw, self.vb, self.gw, self.gb, self.xb, self.acts, self.dzs, self.zeros, self.tiles, self.row_losses,
                np.float32(lr), np.float32(momentum), self.mean, losses, self.threads,
            )  # fmt: skip
        return losses

    def weights(self) -> dict[str, Array]:
        """The weights as the network names and shapes them."""
        named: dict[str, Array] = {}
        for layer, row in zip(self.chain.layers, self.table, strict=True):
            K, N = layer.D_in, layer.D_out
            named[layer.weight] = np.ascontiguousarray(unpack(self.w[row[_W] : row[_W] + packed_size(K, N)], K, N).T)
            if layer.bias:
                named[layer.bias] = self.bias[row[_BIAS] : row[_BIAS] + N].copy()
        return named


_NO_CLASSES, _NO_TARGETS = np.zeros(0, np.int64), np.zeros((0, 0), np.float32)


def _train_table(chain: Chain) -> Array:
    """layer_table with, for each layer, its place in wt, its place in acts (for one row), and whether it has a bias."""
    table = np.zeros((len(chain.layers), 8), np.int64)
    table[:, :5] = layer_table(chain)
    wt = act = 0
    for i, layer in enumerate(chain.layers):
        table[i, _WT], table[i, _ACT], table[i, _HAS_BIAS] = wt, act, layer.bias is not None
        wt += packed_size(layer.D_out, layer.D_in) if i else 0
        act += padded(layer.D_out)
    return table


def _tasks(chain: Chain) -> Array:
    """Pieces of the update: (layer, first column, first k, last k)."""
    return np.array(
        [
            (i, n, k, min(k + TASK_K, layer.D_in))
            for i, layer in enumerate(chain.layers)
            for n in range(0, padded(layer.D_out), PANEL)
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
            row_flop=3 * sum(map(net.row_flop, net.nodes)),
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
        if job.loss == "cross_entropy" and chain.layers[-1].activation != "Identity":
            return f"cross_entropy takes logits, got {chain.layers[-1].activation} behind the last layer"
        shared = len({layer.weight for layer in chain.layers}) != len(chain.layers)
        odd = refuse_dtype(self.name, net, chain)
        return "every layer must have weights of its own" if shared else (odd.why if odd else "")

    def trainer(self, claim: Claim, job: Job, weights: dict[str, Array], threads: int) -> Trainer:
        assert isinstance(claim.facts, Chain)
        return Trainer(claim.facts, job, weights, threads)
