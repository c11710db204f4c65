"""--ranks N of the commands: start the ranks, or find those that are running."""

from __future__ import annotations

from typing import TYPE_CHECKING

from typer import Exit

from onchip.cli.output import ranks_progress
from onchip.errors import OnchipError

if TYPE_CHECKING:
    from onchip.runtime.distributed.ranks import Ranks


def start_ranks(ranks: int | None, args: list[str]) -> Ranks:
    """The ranks of this command: this process only, or all that mpiexec started. With --ranks, start them; this process
    ends when they end.
    """
    from onchip.runtime.distributed.launchers import is_one_of_many
    from onchip.runtime.distributed.ranks import find_ranks, silence_other_ranks
    from onchip.runtime.distributed.supervise import Reporter, check_started_once, is_supervised, run_ranks

    if ranks not in (None, 1) and not (is_one_of_many() or is_supervised()):
        with ranks_progress() as show:
            raise Exit(run_ranks(ranks, args, show))
    found = find_ranks()
    Reporter(found)
    silence_other_ranks(found)
    try:
        check_started_once(ranks, found)
    except OnchipError:  # every rank raises it, so there are no others to stop
        found.leave()
        raise
    return found
