"""onchip data: download published data sets."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from onchip.cli.options import Json, completes
from onchip.cli.talk import print_json, progress, say

NAMES = ("mnist",)  # those of onchip.workloads.download


def data(
    name: Annotated[
        str, Argument(metavar="NAME", help=f"A data set: {', '.join(NAMES)}.", autocompletion=completes(NAMES))
    ],
    source: Annotated[
        str | None,
        Option("--from", metavar="URL", help="A URL or a folder that holds the files; else where they are published."),
    ] = None,
    to: Annotated[
        Path | None,
        Option(metavar="FOLDER", help="Where NAME/ is put; else $ONCHIP_DATA, or `data` in the cache folder."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Fetch a data set; what was cut short goes on where it stopped.

    \b
    Example:
      onchip data mnist

    \b
    From a mirror or a folder, to a folder of your own:
      onchip data mnist --from https://mirror.example/mnist --to data
      ONCHIP_DATA=data onchip train digits

    Each file is held against its checksum, and appears whole or not at all.
    """
    from onchip.network.names import known_name
    from onchip.network.text import plural
    from onchip.workloads.download import DATA_SETS, data_folder, fetch

    wanted = DATA_SETS[known_name(name, DATA_SETS, "data set", "onchip data mnist")]
    folder = (to or data_folder()) / wanted.name
    with progress(f"fetch {wanted.name}", wanted.size_bytes) as update:
        fetched = fetch(wanted, folder, (source,) if source else (), lambda done: update(done, f"{done / 1e6:,.1f} MB"))
    if as_json:
        files = [file.name for file in wanted.files]
        print_json({"name": wanted.name, "folder": folder, "files": files, "fetched": fetched})
    else:
        there = len(wanted.files) - fetched
        before = f", {there} {'was' if there == 1 else 'were'} there" if there else ""
        say(f"{folder}: {plural(fetched, 'file')} fetched and checked{before}")
        if to is not None:
            say(f"to use it: export ONCHIP_DATA={to.absolute()}")
