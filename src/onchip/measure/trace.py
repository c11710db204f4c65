"""A timeline of recorded calls and trainings in Chrome's trace format, for https://ui.perfetto.dev."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from onchip.files import atomic_write
from onchip.runtime.spans import COPY, Recorder, Span, count_calls
from onchip.train.recording import TrainingRecorder

CALLS = "calls"  # the track of the engine's calls; the others are threads and streams
PHASES, EPOCHS = "phases", "epochs"  # the tracks of a training


def save_trace(
    path: str | Path, recorded: Sequence[tuple[str, Recorder]], trainings: Sequence[TrainingRecorder] = ()
) -> None:
    """Write the file, whole or not at all.

    recorded   each engine's device and its calls; an engine is a process of the timeline, its threads are the tracks
    trainings  each is a process too, with a track of its phases and one of its epochs
    """
    document = {"traceEvents": list(trace_events(recorded, trainings)), "displayTimeUnit": "ns"}
    with atomic_write(Path(path)) as file:
        file.write(json.dumps(document).encode())


def trace_events(
    recorded: Sequence[tuple[str, Recorder]], trainings: Sequence[TrainingRecorder] = ()
) -> Iterator[dict[str, Any]]:
    """The events, from time 0: the begin of the first call or phase. Times are in microseconds."""
    begins = [call.begin_ns for _, recorder in recorded for call in recorder.calls]
    zero = min(begins + [span.begin_ns for training in trainings for span in training.phases], default=0)
    for process, (chosen, recorder) in enumerate(recorded):
        tracks: dict[str, int] = {CALLS: 0}
        for call in recorder.calls:
            yield _event(process, 0, f"call, {call.rows} rows", call.begin_ns - zero, call.end_ns, call.begin_ns)
            for name, span in _without_overlap(call.spans):
                track = tracks.setdefault(name, len(tracks))
                event = _event(process, track, span.name, span.begin_ns - zero, span.end_ns, span.begin_ns)
                args = {"bytes": span.nbytes} if span.group == COPY else {"rows": span.rows, "group": span.group}
                yield event | {"args": args}
        device = chosen.partition(" ")[0]
        where = f"{recorder.where}: " if recorder.where else ""
        yield _name("process_name", process, 0, f"{where}{recorder.plan.network.name} on {device}")
        recorded_calls, calls = count_calls([recorder])
        which = f", {recorded_calls:,} of {calls:,} recorded" if recorded_calls < calls else ""
        for name, number in tracks.items():
            yield _name("thread_name", process, number, name + (which if name == CALLS else ""))
    for process, training in enumerate(trainings, len(recorded)):
        yield from _training_events(process, training, zero)


def _without_overlap(spans: Iterable[Span]) -> Iterator[tuple[str, Span]]:
    """Each span with its track; one that overlaps others gets a further track, as events of a track cannot overlap."""
    ends: dict[str, list[int]] = {}  # of the last span on each of the tracks
    for span in sorted(spans, key=lambda span: span.begin_ns):
        of_track = ends.setdefault(span.track, [])
        number = next((i for i, end in enumerate(of_track) if end <= span.begin_ns), len(of_track))
        of_track[number : number + 1] = [span.end_ns]
        yield f"{span.track}, overlapping {number}" if number else span.track, span


def _training_events(process: int, training: TrainingRecorder, zero: int) -> Iterator[dict[str, Any]]:
    assert training.plan is not None, "only trainings that began have a timeline"
    for span in training.phases:
        yield _event(process, 0, span.name, span.begin_ns - zero, span.end_ns, span.begin_ns)
    for steps in training.spans:
        event = _event(process, 1, f"epoch {steps.epoch}", steps.begin_ns - zero, steps.end_ns, steps.begin_ns)
        yield event | {"args": {"steps": steps.steps}}
    device = training.chosen.partition(" ")[0]
    yield _name("process_name", process, 0, f"training {training.network} on {device}")
    for number, name in enumerate((PHASES, EPOCHS)):
        yield _name("thread_name", process, number, name)


def _event(process: int, track: int, name: str, begin: int, end_ns: int, begin_ns: int) -> dict[str, Any]:
    times = {"ts": begin / 1e3, "dur": (end_ns - begin_ns) / 1e3}
    return {"name": name, "ph": "X", "pid": process, "tid": track, **times}


def _name(kind: str, process: int, track: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": track, "args": {"name": name}}
