"""onchip data: download published data sets."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from onchip.cli.options import Json, completes
from onchip.cli.output import print_json, print_message, progress

NAMES = ("mnist",)  # those of onchip.workloads.download


def data(
    name: Annotated[
        str, Argument(metavar="NAME", help=f"A data set: {', '.join(NAMES)}.", autocompletion=completes(NAMES))
    ],
    source: Annotated[
        str | None,
        Option("--from", metavar="URL", help="A URL or a folder with the files; default: the publisher's."),
    ] = None,
    to: Annotated[
        Path | None,
        Option(
            metavar="FOLDER", help="Parent folder of NAME/; default: $ONCHIP_DATA, else `data` in the cache folder."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Download a data set; an interrupted download is resumed.

    \b
    Example:
      onchip data mnist

    \b
    From a mirror or a folder, to another folder:
      onchip data mnist --from https://mirror.example/mnist --to data
      ONCHIP_DATA=data onchip train digits

    Each file is verified by its checksum and appears complete or not at all.
    """
    from onchip.network.names import known_name
    from onchip.network.text import plural
    from onchip.workloads.download import DATA_SETS, data_folder, fetch

    wanted = DATA_SETS[known_name(name, DATA_SETS, "data set", "onchip data mnist")]
    folder = (to or data_folder()) / wanted.name
    with progress(f"download {wanted.name}", wanted.size_bytes) as update:
        fetched = fetch(wanted, folder, (source,) if source else (), lambda done: update(done, f"{done / 1e6:,.1f} MB"))
    if as_json:
        files = [file.name for file in wanted.files]
        print_json({"name": wanted.name, "folder": folder, "files": files, "fetched": fetched})
    else:
        present = len(wanted.files) - fetched
        already = f", {present} already present" if present else ""
        print_message(f"{folder}: {plural(fetched, 'file')} downloaded and verified{already}")
        if to is not None:
            print_message(f"to use it: export ONCHIP_DATA={to.absolute()}")
