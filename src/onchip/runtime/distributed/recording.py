"""What a rank records for the timeline that rank 0 writes."""

from __future__ import annotations

import sys
from time import perf_counter_ns

from onchip.runtime.distributed.messages import ClockAnswer, ClockRequest, Recorded
from onchip.runtime.distributed.ranks import Ranks
from onchip.runtime.engine import Engine
from onchip.runtime.spans import Recorder

ROUND_TRIPS = 20  # to rank 0, at the start of the job


class Recording:
    """Records the calls of this rank's engine, on rank 0's clock.

    On one machine time.perf_counter_ns is the same clock for all processes. A rank on another machine queries rank 0's
    clock. Rank 0 answered between the request and its answer's arrival, so each round trip bounds the difference of the
    clocks from both sides. The closest bounds of ROUND_TRIPS count, those of the shortest way there and the shortest
    way back: times are off by at most half of what lies between them, which is less than half of the shortest round
    trip. As ranks sleep between polls, that is up to 1 ms.
    """

    def __init__(self, ranks: Ranks, engine: Engine) -> None:
        self._ranks, self._engine, self._recorder = ranks, engine, Recorder(engine.plan)
        self._left = ROUND_TRIPS
        # How far rank 0's clock is ahead.
        self._least_ns, self._most_ns = (-sys.maxsize, sys.maxsize) if ranks.machine else (0, 0)
        engine.record(self._recorder)
        if ranks.machine:  # rank 0 is on machine 0
            self._request()

    def _request(self) -> None:
        self._left -= 1
        self._ranks.send(0, ClockRequest(perf_counter_ns()))

    def on_answer(self, answer: ClockAnswer) -> None:
        """Use rank 0's answer, which comes before its Rest, and send the next request."""
        self._least_ns = max(self._least_ns, answer.ns - perf_counter_ns())
        self._most_ns = min(self._most_ns, answer.ns - answer.sent_ns)
        if self._left:
            self._request()

    def recorded(self) -> Recorded:
        ahead_ns = (self._least_ns + self._most_ns) // 2
        calls = [call.shifted(ahead_ns) for call in self._recorder.calls]
        recorder = self._recorder
        return Recorded(self._engine.chosen, calls, recorder.resources, recorder.clock, recorder.lost)
