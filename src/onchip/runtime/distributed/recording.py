"""What a rank records for the timeline that rank 0 writes."""

from __future__ import annotations

from time import perf_counter_ns

from onchip.runtime.distributed.messages import ClockAnswer, ClockRequest, Recorded
from onchip.runtime.distributed.ranks import Ranks
from onchip.runtime.engine import Engine
from onchip.runtime.spans import Recorder

ROUND_TRIPS = 20  # to rank 0, at the start of the job


class Recording:
    """Records the calls of this rank's engine, on rank 0's clock.

    On one machine time.perf_counter_ns is the same clock for all processes. From another machine, this rank asks rank 0
    for its time and takes the answer as the time in the middle of the round trip. The shortest of ROUND_TRIPS counts:
    the times of this rank are off by at most half of it. That is some 100 us, as ranks sleep between polls.
    """

    def __init__(self, ranks: Ranks, engine: Engine) -> None:
        self._ranks, self._engine, self._recorder = ranks, engine, Recorder(engine.plan)
        self._left, self._shortest_ns, self._ahead_ns = ROUND_TRIPS, 0, 0
        engine.record(self._recorder)
        if ranks.machine:  # rank 0 is on machine 0
            self._request()

    def _request(self) -> None:
        self._left -= 1
        self._ranks.send(0, ClockRequest(perf_counter_ns()))

    def on_answer(self, answer: ClockAnswer) -> None:
        """Use rank 0's answer, which comes before its Rest, and send the next request."""
        here = perf_counter_ns()
        duration = here - answer.sent_ns
        if not self._shortest_ns or duration < self._shortest_ns:
            self._shortest_ns, self._ahead_ns = duration, answer.ns - (answer.sent_ns + duration // 2)
        if self._left:
            self._request()

    def recorded(self) -> Recorded:
        calls = [call.shifted(self._ahead_ns) for call in self._recorder.calls]
        return Recorded(self._engine.chosen, calls, self._recorder.resources)
