"""onchip cache: show or clear the cache on disk."""

from __future__ import annotations

from typing import Annotated

from typer import Option

from onchip.cli.options import Json
from onchip.cli.talk import print_json, say
from onchip.network.text import columns, plural


def cache(
    clear: Annotated[bool, Option("--clear", help="Remove all of it; what is needed is made again.")] = False,
    as_json: Json = False,
) -> None:
    """Show what is kept on the disk for the next time, or clear it.

    \b
    Example:
      onchip cache

    It lies in $ONCHIP_CACHE, else in $XDG_CACHE_HOME/onchip, else in ~/.cache/onchip. What is not there yet is made,
    and that kernels are compiled is said once; not where $ONCHIP_QUIET is set.
    """
    from onchip.cache import FOLDERS, cache_dir, clear_cache, kept_files

    sizes = {name: [path.stat().st_size for path in files] for name, files in kept_files().items()}
    removed = clear_cache() if clear else 0
    if as_json:
        kept = {name: {"files": len(found), "bytes": sum(found)} for name, found in sizes.items()}
        print_json({"folder": str(cache_dir()), "kept": kept, "removed": removed})
    elif clear:
        total = sum(map(sum, sizes.values()))
        print(f"removed {plural(removed, 'file')}, {total / 2**20:,.1f} MiB, from {cache_dir()}")
    else:
        rows = [[name, FOLDERS[name], f"{len(found):,}", f"{sum(found) / 2**20:,.1f}"] for name, found in sizes.items()]
        print(columns(["folder", "what", "files", "MiB"], rows, right=(2, 3)))
        say(f"in {cache_dir()}; onchip cache --clear removes it")
