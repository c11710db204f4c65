"""sentiment in torch: by folded tables that torch computes itself, and on a GPU by convolutions as gemms."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from onchip.bench.cases.gpu_host import LoadedHostJob
from onchip.bench.gpu_clock import Forward, Variants
from onchip.bench.peers.gpu import COMPUTE, Allowance, Call, GpuTask, compile_faster
from onchip.bench.stage import TorchStage
from onchip.network.graph import Network
from onchip.network.layers import Conv1d, Linear

Tensor = Any
COMPILE_S = 45.0  # seconds for torch.compile per benchmark


@dataclass(frozen=True, eq=False)
class Weights:
    """A network's weights as tensors: the embedding (V, E), (weight, bias) of convolutions (C, E, K) and Linears."""

    table: Tensor
    convs: Sequence[tuple[Tensor, Tensor]]
    linears: Sequence[tuple[Tensor, Tensor]]

    @classmethod
    def on_gpu(cls, net: Network, precision: str, stage: TorchStage) -> Weights:
        stage.torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
        return cls.of(net, stage.torch, stage.device, COMPUTE[precision])

    @classmethod
    def of(cls, net: Network, torch: Any, device: Any = "cpu", dtype: str = "float32") -> Weights:
        """In the compute dtype, from the network's arrays."""

        def put(name: str) -> Tensor:
            return torch.tensor(net.weights[name]).to(device).to(getattr(torch, dtype))

        def pairs(layer: type[Conv1d | Linear]) -> list[tuple[Tensor, Tensor]]:
            nodes = [node for node in net.nodes if isinstance(node.layer, layer)]
            return [(put(node.weights["weight"]), put(node.weights["bias"])) for node in nodes]

        return cls(put("emb.weight"), pairs(Conv1d), pairs(Linear))

    def taps(self) -> list[Tensor]:
        """The table (K, V, C) of each convolution: every token's row times every tap."""
        return [self.table @ W.permute(2, 1, 0) for W, _ in self.convs]


def finish(torch: Any, weights: Weights, maxima: Sequence[Tensor]) -> Tensor:
    """The layers after the max over time of each branch, (B, C): bias, ReLU, and the Linear layers."""
    functional = torch.nn.functional
    y = torch.cat([functional.relu(h + b) for h, (_, b) in zip(maxima, weights.convs, strict=True)], 1)
    for W, b in weights.linears[:-1]:
        y = functional.relu(functional.linear(y, W, b))
    return functional.linear(y, *weights.linears[-1]).float()


def looked_up(torch: Any, weights: Weights, tables: Sequence[Tensor], ids: Tensor) -> Tensor:
    """Sums of table rows; torch.compile fuses each branch into one loop."""
    ids, maxima = ids.long(), []
    for T in tables:
        P = ids.shape[1] - len(T) + 1
        maxima.append(sum(T[k][ids[:, k : k + P]] for k in range(len(T))).amax(1))
    return finish(torch, weights, maxima)


def bags(torch: Any, weights: Weights, tables: Sequence[Tensor], ids: Tensor) -> Tensor:
    """The same by torch's embedding_bag."""
    maxima = []
    for T in tables:
        K, V, C = T.shape
        indices = ids.long().unfold(1, K, 1) + V * torch.arange(K, device=ids.device)  # (B, P, K), rows of all taps
        sums = torch.nn.functional.embedding_bag(indices.reshape(-1, K), T.view(K * V, C), mode="sum")
        maxima.append(sums.view(len(ids), -1, C).amax(1))
    return finish(torch, weights, maxima)


def windows(torch: Any, weights: Weights, taps: Sequence[Tensor], ids: Tensor) -> Tensor:
    """Each convolution as one batched gemm over an overlapping view of the embedded tokens, without a copy.

    taps  of each convolution (K * E, C)
    """
    embedded = torch.nn.functional.embedding(ids, weights.table)
    B, S, E = embedded.shape
    maxima = []
    for W in taps:
        K = len(W) // E
        P = S - K + 1
        view = embedded.as_strided((P, B, K * E), (E, S * E, 1))  # batched over positions; each gemm has all sentences
        maxima.append(torch.bmm(view, W.expand(P, -1, -1)).amax(0))
    return finish(torch, weights, maxima)


class SentimentPeers:
    """The peers of one benchmark: tables and compiled functions are shared by all ids."""

    def __init__(self, net: Network) -> None:
        self._net, self._allowance = net, Allowance(COMPILE_S)
        self._tables: dict[str, tuple[Weights, list[Tensor]]] = {}  # for one precision at a time: they are gigabytes
        self._compiled: dict[tuple[str, int], Call] = {}

    def fold(self, precision: str, stage: TorchStage) -> tuple[Weights, list[Tensor]]:
        """The weights, uploaded from the host, and the tables."""
        weights = Weights.on_gpu(self._net, precision, stage)
        return weights, weights.taps()

    def _folded(self, precision: str, stage: TorchStage) -> tuple[Weights, list[Tensor]]:
        if precision not in self._tables:
            self._compiled.clear()  # it reads the tables of another precision
            self._tables = {precision: self.fold(precision, stage)}
        return self._tables[precision]

    def bags(self, task: GpuTask, stage: TorchStage) -> Variants:
        call = functools.partial(bags, stage.torch, *self._folded(task.precision, stage))
        return {"": Forward(functools.partial(call, task.x))}

    def compiled(self, task: GpuTask, stage: TorchStage) -> Variants:
        return {"": Forward(functools.partial(self._compile(task, stage), task.x))}

    def _compile(self, task: GpuTask, stage: TorchStage) -> Call:
        key = task.precision, len(task.x)
        if key not in self._compiled:
            call = functools.partial(looked_up, stage.torch, *self._folded(task.precision, stage))
            _, self._compiled[key] = compile_faster(self._allowance, lambda task, stage: {"": call}, task, stage)
        return self._compiled[key]

    def windows(self, task: GpuTask, stage: TorchStage) -> Variants:
        weights = Weights.on_gpu(self._net, task.precision, stage)
        taps = [W.permute(2, 1, 0).reshape(-1, len(W)) for W, _ in weights.convs]
        return {"": Forward(functools.partial(windows, stage.torch, weights, taps, task.x))}

    def from_host(self, host: LoadedHostJob, stage: TorchStage) -> tuple[Callable[[], object], str]:
        ids, out = (stage.torch.from_numpy(array) for array in (host.x, host.y))
        run = self._compile(GpuTask(self._net, host.job.precision, "float32", ids.to(stage.device)), stage)
        return lambda: out.copy_(run(ids.to(stage.device, non_blocking=True))), ""
