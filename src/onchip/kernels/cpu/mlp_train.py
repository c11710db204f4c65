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

from onchip.kernels.chain import Chain, find_chain, why_not_float32
from onchip.kernels.cpu.activation import RELU, SIGMOID, TANH, activate, expm1_exp
from onchip.kernels.cpu.dense import dense
from onchip.kernels.cpu.jit import LAUNCH, address, compiled, use_threads
from onchip.kernels.cpu.mlp_fused import layer_table, packed_recipes, padded_width
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
def _loss_row(
    z: Array, dz: Array, at: int, N: int, stride: int, code: int, row: int, classes: Array, targets: Array
) -> float:
    """The loss of one row with output z[at : at + N]; its gradient goes to dz, 0 in the columns past N."""
    for n in range(at + N, at + stride):
        dz[n] = _ZERO
    loss = 0.0
    if code == CROSS_ENTROPY:
        highest = z[at]
        for n in range(at + 1, at + N):
            highest = max(highest, z[n])
        total = _ZERO
        for n in range(at, at + N):
            _, e = expm1_exp(z[n] - highest)
            dz[n] = e
            total += e
        for n in range(at, at + N):
            dz[n] = dz[n] / total
        truth = at + classes[row]
        dz[truth] -= _ONE
        loss = np.log(np.float64(total)) - np.float64(z[truth] - highest)
    else:
        for n in range(N):
            difference = z[at + n] - targets[row, n]
            loss += 0.5 * np.float64(difference) * np.float64(difference)
            dz[at + n] = difference
    return loss


@compiled()
def _through_activation(dz: Array, a: Array, begin: int, count: int, N: int, stride: int, code: int) -> None:
    """dz *= f'(.), written by the activation's own output a, for rows of N numbers from `begin` on."""
    for r in range(count):
        at = begin + r * stride
        grad, out = dz[at : at + N], a[at : at + N]
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
    first: int, count: int, order: Array, begin: int, x: Array, classes: Array, targets: Array, table: Array, w: Array,
    bias: Array, wt: Array, xb: Array, acts: Array, dzs: Array, zeros: Array, loss_code: int, losses: Array,
) -> None:  # fmt: skip
    """Rows first..first+count of the block that starts at order[begin]: gather, forward, loss, backward to every dz."""
    L, K0 = len(table), table[0, _K]
    w_at, bias_at, wt_at = address(w), address(bias), address(wt)
    acts_at, dzs_at, zeros_at = address(acts), address(dzs), address(zeros)
    for r in range(first, first + count):
        row, to = x[order[begin + r]], xb[r * K0 : (r + 1) * K0]
        for k in range(K0):
            to[k] = row[k]
    src, src_row = address(xb) + first * K0 * 4, K0 * 4
    for layer in range(L):
        N, code = table[layer, _N], table[layer, _CODE]
        width = padded_width(N)
        at = table[layer, _ACT] + first * width
        dense(
            src, src_row, count, w_at + table[layer, _W] * 4, table[layer, _K], width, bias_at + table[layer, _BIAS] * 4,
            acts_at + at * 4, width * 4, _ZERO if code == RELU else _NO_FLOOR,
        )  # fmt: skip
        if code > RELU:
            activate(acts, at, count, N, width, code)
        src, src_row = acts_at + at * 4, width * 4
    for layer in range(L - 1, -1, -1):
        N = table[layer, _N]
        width = padded_width(N)
        at = table[layer, _ACT] + first * width
        if layer == L - 1:
            for r in range(count):
                row = order[begin + first + r]
                losses[first + r] = _loss_row(acts, dzs, at + r * width, N, width, loss_code, row, classes, targets)
        else:
            above = padded_width(table[layer + 1, _N])
            dense(
                dzs_at + (table[layer + 1, _ACT] + first * above) * 4, above * 4, count, wt_at + table[layer + 1, _WT] * 4,
                table[layer + 1, _N], width, zeros_at, dzs_at + at * 4, width * 4, _NO_FLOOR,
            )  # fmt: skip
        _through_activation(dzs, acts, at, count, N, width, table[layer, _CODE])


@compiled()
def _weights_pass(
    layer: int, n: int, k_first: int, k_last: int, rows: int, is_first: bool, is_last: bool, table: Array, w: Array,
    bias: Array, wt: Array, vw: Array, vb: Array, gw: Array, gb: Array, xb: Array, acts: Array, dzs: Array, zeros: Array,
    tiles: Array, tile: int, lr: np.float32, momentum: np.float32, scale: np.float32,
) -> None:  # fmt: skip
    """Gradient of w[k_first:k_last, n:n+panel] over the block's rows; in the last block also the update."""
    K, N = table[layer, _K], table[layer, _N]
    N_padded = padded_width(N)
    width = _PANEL if n + _PANEL <= N_padded else _LANES
    dz, dz_row = address(dzs) + (table[layer, _ACT] + n) * 4, N_padded * 4
    a, a_row = address(xb), K * 4
    if layer > 0:
        a, a_row = address(acts) + table[layer - 1, _ACT] * 4, padded_width(K) * 4
    grads, grad = (tiles, tile) if is_first and is_last else (gw, 0)
    for k in range(k_first, k_last, _ROWS):
        count = min(_ROWS, k_last - k)
        at = table[layer, _W] + n * K + k * width
        if not (is_first and is_last):
            grad = at
        _gradient_tile(a + k * 4, a_row, dz, dz_row, rows, count, width,
                       address(zeros), address(grads) + grad * 4, is_first)  # fmt: skip
        if is_last:
            _update(w, vw, at, grads, grad, count * width, lr, momentum, scale)
            if layer > 0:
                _transpose(w, at, wt, table[layer, _WT], K, N, k, n, count, width)
    if k_first == 0 and table[layer, _HAS_BIAS]:
        at = table[layer, _BIAS] + n
        sums = gb[at : at + width]
        if is_first:
            for j in range(width):
                sums[j] = _ZERO
        for r in range(rows):
            row = table[layer, _ACT] + r * N_padded + n
            grad_row = dzs[row : row + width]
            for j in range(width):
                sums[j] += grad_row[j]
        if is_last:
            _update(bias, vb, at, gb, at, width, lr, momentum, scale)


@compiled()
def _gradient_tile(
    a: int, a_row: int, dz: int, dz_row: int, rows: int, count: int, width: int, zeros: int, out: int, is_first: bool
) -> None:
    """out[k, n] = (0 or out[k, n]) + sum over rows of a[row, k] dz[row, n], k < count <= ROWS, n < width."""
    out_row = width * 4
    if count == _ROWS:
        init, init_row = (zeros, 0) if is_first else (out, out_row)
        if width == _PANEL:
            multiply_tile(a, 4, a_row, dz, dz_row, init, init_row, out, out_row, rows, _NO_FLOOR, ROWS, 2)
        else:
            multiply_tile(a, 4, a_row, dz, dz_row, init, init_row, out, out_row, rows, _NO_FLOOR, ROWS, 1)
        return
    for k in range(count):
        to = out + k * out_row
        init = zeros if is_first else to
        if width == _PANEL:
            multiply_tile(a + k * 4, 4, a_row, dz, dz_row, init, 0, to, 0, rows, _NO_FLOOR, 1, 2)
        else:
            multiply_tile(a + k * 4, 4, a_row, dz, dz_row, init, 0, to, 0, rows, _NO_FLOOR, 1, 1)


@compiled()
def _update(
    w: Array, v: Array, at: int, g: Array, g_at: int, size: int, lr: np.float32, momentum: np.float32, scale: np.float32
) -> None:
    """v = momentum v + scale g; w -= lr v; for `size` numbers from w[at], v[at] and g[g_at] on."""
    weights, velocity, grads = w[at : at + size], v[at : at + size], g[g_at : g_at + size]
    if momentum == _ZERO:
        for i in range(size):
            weights[i] -= lr * (scale * grads[i])
    else:
        for i in range(size):
            velocity[i] = momentum * velocity[i] + scale * grads[i]
            weights[i] -= lr * velocity[i]


@compiled()
def _transpose(w: Array, w_at: int, wt: Array, wt_at: int, K: int, N: int, k: int, n: int, count: int, width: int) -> None:
    """Keep the transposed copy of w[k:k+count, n:n+width] in step: the backward pass reads w by columns."""
    start = k // _PANEL * _PANEL
    across = min(_PANEL, padded_width(K) - start)
    for j in range(min(width, N - n)):
        at = wt_at + start * N + (n + j) * across + (k - start)
        for r in range(count):
            wt[at + r] = w[w_at + r * width + j]


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
            count = min(BLOCK, size - block)
            is_first, is_last = block == 0, block + BLOCK >= size
            share = (count + threads - 1) // threads
            share = (share + _ROWS - 1) // _ROWS * _ROWS
            for part in numba.prange((count + share - 1) // share):
                first = part * share
                _rows_pass(
                    first, min(share, count - first), order, begin + block, x, classes, targets, table, w, bias, wt, xb,
                    acts, dzs, zeros, loss_code, row_losses,
                )  # fmt: skip
            for t in numba.prange(len(tasks)):
                _weights_pass(
                    tasks[t, 0], tasks[t, 1], tasks[t, 2], tasks[t, 3], count, is_first, is_last, table, w, bias, wt,
                    vw, vb, gw, gb, xb, acts, dzs, zeros, tiles, numba.get_thread_id() * (_ROWS * _PANEL),
                    lr, momentum, scale,
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
        self.tiles = aligned_zeros(numba.config.NUMBA_NUM_THREADS * ROWS * PANEL)
        self.row_losses = np.zeros(rows)
        self.batch = job.batch

    def steps(self, x: Array, y: Array, order: Array, lr: float, momentum: float) -> Array:
        """Train on the rows `order` of x, batch by batch; the loss of each step before its update.

        x (n, D_in) float32; y (n,) int64 classes or (n, D_out) float32 targets
        """
        losses = np.zeros(-(-len(order) // self.batch))
        classes, targets = (y, _NO_TARGETS) if self.loss_code == CROSS_ENTROPY else (_NO_CLASSES, y)
        with LAUNCH:
            use_threads(self.threads)
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
        return "every layer must have weights of its own" if shared else why_not_float32(net, chain)

    def trainer(self, claim: Claim, job: Job, weights: dict[str, Array], threads: int) -> Trainer:
        assert isinstance(claim.facts, Chain)
        return Trainer(claim.facts, job, weights, threads)
