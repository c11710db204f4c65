"""A rung's launches and its scratch memory, collected one by one."""

from __future__ import annotations

from onchip.kernels.cuda.common.arguments import Argument, Scratch
from onchip.kernels.cuda.common.program import Budget, KernelLaunch, LaunchConfig, Program, Steps

_ALIGN_BYTES = 256
_ANY = Budget(255)  # kernel_check reads the budgets of INSTANCES


class LaunchList:
    def __init__(self) -> None:
        self._launches: list[KernelLaunch] = []
        self._scratch_bytes = 0

    def scratch(self, size: int, itemsize: int = 4) -> Scratch:
        """Memory for `size` values that the rest of the run may use."""
        offset = self._scratch_bytes
        self._scratch_bytes += -(-size * itemsize // _ALIGN_BYTES) * _ALIGN_BYTES
        return Scratch(offset)

    def add(
        self, program: Program, config: LaunchConfig, *arguments: Argument, after: tuple[int, ...] | None = None
    ) -> int:
        """Add a launch and return its index; `after`: as in KernelLaunch."""
        self._launches.append(KernelLaunch(program, config, arguments, _ANY, after))
        return self.last

    @property
    def last(self) -> int:
        """The index of the last launch."""
        return len(self._launches) - 1

    def steps(self) -> Steps:
        return Steps(tuple(self._launches), self._scratch_bytes)


def moved(memory: Scratch, nbytes: int) -> Scratch:
    """The memory that begins so many bytes later."""
    return Scratch(memory.offset + nbytes)
