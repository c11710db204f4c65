"""A stand-in for a GPU under peers: torch's CPU, everything done at once, by the host's clock."""

import functools
import time

from onchip.bench.stage import TorchStage


class CpuTorchStage(TorchStage):
    def __init__(self, index=0):
        import torch

        self.torch, self.device = torch, torch.device("cpu")

    def pinned(self, shape, dtype):
        return self.empty(shape, dtype).numpy()

    def record(self, work, times):
        return functools.partial(self._replay, work, times)

    def _replay(self, work, times):
        for _ in range(times):
            y = work()
        return y

    def ms(self, work):
        start = time.perf_counter()
        work()
        return (time.perf_counter() - start) * 1e3

    def trim(self):
        pass

    def synchronise(self):
        pass

    def memory_bytes(self):
        return 0
