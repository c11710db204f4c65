"""--profile and --trace of commands that run engines or train."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from onchip.cli.output import print_message, terminal_width

if TYPE_CHECKING:
    from onchip.measure.profile import Profile

ShowProfile = Annotated[bool, Option("--profile", help="Also print the time of each kernel, per rank: onchip profile.")]
Trace = Annotated[
    Path | None,
    Option("--trace", metavar="FILE", help="Also write a timeline of kernels and copies, for ui.perfetto.dev."),
]

ShowTrainingProfile = Annotated[
    bool, Option("--profile", help="Also print where the time of the training goes, phase by phase.")
]
TrainingTrace = Annotated[
    Path | None,
    Option("--trace", metavar="FILE", help="Also write a timeline of phases and epochs, for ui.perfetto.dev."),
]


@contextlib.contextmanager
def profiled(show: bool, trace: Path | None) -> Iterator[Profile | None]:
    """Record the calls and trainings inside, then print their profile to stderr and write their timeline.

    If networks were trained, the calls that test them are only on the timeline. Yields what it records; None if it
    records nothing.
    """
    if not show and trace is None:
        yield None
        return
    from onchip.measure.profile import profile

    with profile() as found:
        yield found
    if show:
        for each in found.trainings or found.engines:
            print_message(each.fitted(terminal_width(sys.stderr)))
    if trace is not None:
        save_timeline(found, trace)


def save_timeline(found: Profile, path: Path) -> None:
    from onchip.runtime.spans import count_calls

    found.save_trace(path)
    recorded, calls = count_calls(recorder for _, recorder in found.recorded)
    which = f" with {recorded:,} of {calls:,} calls" if recorded < calls else ""
    print_message(f"wrote {path}{which}: open it with https://ui.perfetto.dev")
