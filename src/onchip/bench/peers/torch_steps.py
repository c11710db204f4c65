"""torch as a peer in training steps: the usual code, the same in a CUDA graph, and that of torch.compile in a graph."""

from __future__ import annotations

import contextlib
import functools
import io
from collections.abc import Callable, Mapping
from typing import Any

from onchip.bench.cases.step_job import LR, PeerStep, StepJob
from onchip.bench.frame import UnavailableError
from onchip.bench.peers.cpu import load_torch
from onchip.bench.peers.framework import framework
from onchip.bench.peers.gpu import Allowance
from onchip.bench.stage import TorchStage
from onchip.network.recipe import Array

COMPILE_S = 60.0  # for torch.compile, of all cases


def make_step_peers(is_cpu: bool) -> dict[str, Callable[[StepJob, Any], PeerStep]]:
    """Engine -> its builder; they share a time allowance."""
    if is_cpu:
        return {"torch eager": functools.partial(TorchSteps, None, False)}
    return {
        "torch eager": functools.partial(TorchSteps, None, False),
        "torch graph": functools.partial(TorchSteps, None, True),
        "torch.compile": functools.partial(TorchSteps, Allowance(COMPILE_S), True),
    }


class TorchSteps:
    """Autograd and a fused Adam. In bf16 products run under autocast, as is usual; weights stay float32."""

    def __init__(self, allowance: Allowance | None, is_graph: bool, job: StepJob, stage: TorchStage | None) -> None:
        if stage is not None and not isinstance(stage, TorchStage):
            raise UnavailableError("torch for CUDA is not installed")
        self.torch = load_torch(job.threads) if stage is None else stage.torch
        self.job, self.stage, self.is_graph, self._allowance = job, stage, is_graph, allowance
        self.device = "cpu" if stage is None else stage.device
        self.torch.set_float32_matmul_precision("high" if job.precision == "tf32" else "highest")
        self.torch.backends.cudnn.allow_tf32 = job.precision == "tf32"
        self.setting = ", ".join(
            filter(None, ["Adam, fused", "" if job.precision == "fp32" else f"{job.precision} autocast"])
        )

    def losses(self, rows: Mapping[str, Array], count: int) -> Array:
        step = self._step(self._module(), rows, lambda loss_of: loss_of)
        losses: Array = self.torch.stack([step().detach().clone().float() for _ in range(count)]).cpu().numpy()
        return losses

    def prepare(self, rows: Mapping[str, Array]) -> Callable[[], Any]:
        module = self._module()
        if self._allowance is None:
            step = self._step(module, rows, lambda loss_of: loss_of)
        else:
            with self._allowance.spend("torch.compile"), contextlib.redirect_stderr(io.StringIO()):
                self.torch._dynamo.reset()
                compiled = functools.partial(self.torch.compile, dynamic=False, fullgraph=True)
                step = self._step(module, rows, compiled)
                for _ in range(3):
                    step()
                self.setting += ", compiled loss and gradients"
        if not self.is_graph or self.stage is None:
            return step
        self.setting += ", a CUDA graph per step"
        return self.stage.record(step, 1)

    def _module(self) -> Any:
        net = self.job.net
        module = framework("torch_network").torch_module(net, trains=True).train().to(self.device)
        names = self.job.trainable
        frozen = [name for name in names if not self.job.network.is_trained(name)]
        if frozen:
            for parameter, name in zip(module.parameters(), names, strict=True):
                parameter.requires_grad_(name not in frozen)
        return module

    def _step(self, module: Any, rows: Mapping[str, Array], compiled: Callable[[Any], Any]) -> Callable[[], Any]:
        torch, functional = self.torch, self.torch.nn.functional
        *inputs, target, _ = (torch.from_numpy(array).to(self.device) for array in rows.values())
        is_entropy = self.job.network.loss == "cross_entropy"
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        options = {} if self.stage is None else {"capturable": True}
        optimiser = torch.optim.Adam(trained, lr=LR, fused=True, **options)
        kind = "cpu" if self.stage is None else "cuda"
        is_mixed = self.job.precision in ("bf16", "fp16")
        dtype = torch.float16 if self.job.precision == "fp16" else torch.bfloat16

        def loss_of(*xs: Any) -> Any:
            with torch.autocast(kind, dtype, enabled=is_mixed, cache_enabled=False):
                y = module(*xs).float()
            return functional.cross_entropy(y, target) if is_entropy else functional.mse_loss(y, target)

        run = compiled(loss_of)

        def step() -> Any:
            optimiser.zero_grad(set_to_none=not self.is_graph)
            loss = run(*inputs)
            loss.backward()
            optimiser.step()
            return loss

        return step
