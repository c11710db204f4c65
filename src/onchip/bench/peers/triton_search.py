"""Search for the best setting of the Triton kernel: a few distant settings, then the neighbours of the best."""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from onchip.bench.frame import UnavailableError, first_line
from onchip.bench.gpu_clock import TRIALS, Forward, Variants
from onchip.bench.stage import TorchStage

if TYPE_CHECKING:
    from onchip.bench.peers.frameworks.triton_mlp import Choice, TritonMlp

TUNE_S = 12.0  # to compile and try settings for one task
RETRIED = 4  # settings of an earlier task of the same kind
FINALISTS = 2  # settings that are tried with all precisions and column layouts
CALLS = 5  # per sample
TOLERANCE = 0.05  # against torch, relative to the largest value: Triton compiled some settings wrongly


class Search:
    """Settings of one network over x, each compiled, compared with `expected` and timed, within a time budget."""

    def __init__(self, x: Any, y: Any, expected: Any, stage: TorchStage) -> None:
        """y: (B, D_out), written by each setting. expected: torch's output for x."""
        self._x, self._y, self._expected, self._stage = x, y, expected, stage
        self._until = time.perf_counter() + TUNE_S
        self._failed = UnavailableError("no setting of the Triton kernel was tried")
        self.ms: dict[Choice, float] = {}

    @property
    def is_over(self) -> bool:
        return time.perf_counter() > self._until

    def call(self, net: TritonMlp, choice: Choice, precision: str) -> Callable[[], Any] | None:
        """A call of this setting, if it compiles and is correct."""
        call = functools.partial(net, self._x, self._y, choice, precision)
        self._stage.poison(self._y)
        try:
            call()
            self._stage.synchronise()
        except Exception as error:  # too much shared memory, too many registers: different exceptions
            self._failed = UnavailableError(f"triton does not work here: {first_line(error)}")
            return None
        expected = self._expected.float()
        if not (self._y.float() - expected).abs().max() <= TOLERANCE * expected.abs().max():  # false for NaN
            self._failed = UnavailableError(f"triton is wrong with {choice}")
            return None
        return call

    def try_all(self, choices: Sequence[Choice], net: TritonMlp, precision: str) -> None:
        for choice in choices:
            if self.ms and self.is_over:
                return
            call = self.call(net, choice, precision)
            if call is not None:
                graph = self._stage.record(call, CALLS)
                self.ms[choice] = statistics.median(self._stage.ms(graph) for _ in range(TRIALS))

    def ranking(self) -> list[Choice]:
        """Fastest first."""
        if not self.ms:
            raise self._failed
        return sorted(self.ms, key=lambda choice: self.ms[choice])


def best_settings(
    search: Search,
    nets: Sequence[TritonMlp],
    precisions: Sequence[str],
    first: Sequence[Choice],
    around: Callable[[Choice], Sequence[Choice]] | None,
) -> Variants:
    """The best settings found, with each precision and column layout that the time budget permits.

    nets    the same network, with its columns padded in different ways
    first   settings to try
    around  neighbours of the best of them; None: `first` comes from an earlier search
    """
    search.try_all(first, nets[0], precisions[0])
    if around is not None:
        search.try_all(around(search.ranking()[0]), nets[0], precisions[0])
    variants: dict[str, Forward] = {}
    for choice, precision, net in itertools.product(search.ranking()[:FINALISTS], precisions, nets):
        if variants and search.is_over:
            break
        call = search.call(net, choice, precision)
        if call is not None:
            columns = f"{net.KA}+{net.KB}" if net.KB else str(net.KA)
            name = f"{choice}, {columns} columns{', 3xTF32' if precision == 'tf32x3' else ''}"
            variants[name] = Forward(call, eager=False)  # a launch from Python often takes longer than the kernel
    return variants
