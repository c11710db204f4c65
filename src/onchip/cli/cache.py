"""onchip cache: show or clear the cache on disk."""

from __future__ import annotations

from typing import Annotated

from typer import Option

from onchip.cli.options import Json
from onchip.cli.output import print_json, print_message
from onchip.network.text import columns, plural


def cache(
    clear: Annotated[bool, Option("--clear", help="Remove all entries; they are built again when needed.")] = False,
    as_json: Json = False,
) -> None:
    """Show the cache on disk (kernels, rates, tables), or clear it.

    \b
    Example:
      onchip cache

    Its folder is $ONCHIP_CACHE, else $XDG_CACHE_HOME/onchip, else ~/.cache/onchip. Missing entries are built when
    needed; a message reports compilation once, unless $ONCHIP_QUIET is set.
    """
    from onchip.cache import FOLDERS, cache_dir, cached_files, clear_cache

    sizes = {name: [path.stat().st_size for path in files] for name, files in cached_files().items()}
    removed = clear_cache() if clear else 0
    if as_json:
        entries = {name: {"files": len(found), "bytes": sum(found)} for name, found in sizes.items()}
        print_json({"folder": str(cache_dir()), "kept": entries, "removed": removed})
    elif clear:
        total = sum(map(sum, sizes.values()))
        print(f"removed {plural(removed, 'file')}, {total / 2**20:,.1f} MiB, from {cache_dir()}")
    else:
        rows = [[name, FOLDERS[name], f"{len(found):,}", f"{sum(found) / 2**20:,.1f}"] for name, found in sizes.items()]
        print(columns(["folder", "what", "files", "MiB"], rows, right=(2, 3)))
        print_message(f"in {cache_dir()}; onchip cache --clear removes it")
