"""onchip cache: show or clear the cache on disk."""

from __future__ import annotations

from typing import Annotated

from typer import Option

from onchip.cli.options import Json
from onchip.cli.output import print_json, print_message
from onchip.network.text import columns, plural


def cache(
    clear: Annotated[bool, Option("--clear", help="Remove all entries; they are built again when needed.")] = False,
    warm: Annotated[
        str | None, Option(metavar="MODEL", help="Compile the kernels of a network, such as when an image is built.")
    ] = None,
    device: Annotated[
        str, Option(help="For --warm: auto, cpu, cuda, or a GPU that need not be present, such as h200.")
    ] = "auto",
    precision: Annotated[str, Option(help="For --warm: fp32, tf32, bf16 or fp16.")] = "fp32",
    batch: Annotated[int, Option(metavar="ROWS", help="For --warm: rows per call, besides calls with one row.")] = 64,
    as_json: Json = False,
) -> None:
    """Show the cache on disk (kernels, rates, tables), or clear it.

    \b
    Example:
      onchip cache
      onchip cache --warm decode --device cpu

    Its folder is $ONCHIP_CACHE, else $XDG_CACHE_HOME/onchip, else ~/.cache/onchip. Missing entries are built when
    needed; a message reports compilation once, unless $ONCHIP_QUIET is set.
    """
    if warm is not None:
        _warm(warm, device, precision, batch, clear, as_json)
        return

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


def _warm(model: str, device: str, precision: str, batch: int, clear: bool, as_json: bool) -> None:
    """Compile the kernels of a network into the cache."""
    from onchip.cache import cache_dir
    from onchip.errors import InputError
    from onchip.runtime.warm import warm
    from onchip.workloads import load

    if clear:
        got, hint = "--clear and --warm", "onchip cache --clear, then onchip cache --warm MODEL"
        raise InputError("one thing at a time", got=got, expected="one of them", hint=hint)
    if batch < 1:
        raise InputError("bad number of rows", got=str(batch), expected="at least 1", hint="--batch 64")
    chosen = warm(load(model), device, precision, batch)
    if as_json:
        print_json(
            {"folder": str(cache_dir()), "model": model, "device": chosen, "precision": precision, "batch": batch}
        )
    else:
        print_message(f"device: {chosen}")
        print(f"the kernels of {model} are in {cache_dir()}")
