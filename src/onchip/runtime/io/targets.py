"""The files that results are written to: one or several, each for one output of the network, or an .npz for all."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onchip.errors import InputError
from onchip.files import atomic_write
from onchip.formats.arrays.row_files import npy_header
from onchip.network.graph import Network
from onchip.network.outputs import keep_outputs
from onchip.network.recipe import Array
from onchip.network.types import numpy_dtype
from onchip.runtime.io.packed import unpack

NPZ = ".npz"
ReadRows = Callable[[], Iterator[Array]]  # stored rows, some at a time, from the first on


@dataclass(frozen=True)
class Target:
    path: Path
    name: str | None = None  # of the output; None: the only one, or in an .npz all

    def __str__(self) -> str:
        return f"{self.name}={self.path}" if self.name is not None else str(self.path)


def parse_targets(texts: Sequence[str]) -> tuple[Target, ...]:
    """FILE or NAME=FILE, each."""
    targets = []
    for text in texts:
        name, equals, file = text.partition("=")
        is_named = bool(equals and name and file) and "/" not in name and "\\" not in name
        targets.append(Target(Path(file), name) if is_named else Target(Path(text)))
    return tuple(targets)


def needed_outputs(net: Network, targets: Sequence[Target]) -> Network:
    """The network with the outputs that the targets name; InputError if a file has none, or if it is unclear which."""
    named = [target.name for target in targets if target.name is not None]
    for target in targets:
        if target.name is None and target.path.suffix.lower() != NPZ and len(net.outputs) > 1:
            outputs = ", ".join(f"{name}: {net.types[name]}" for name in net.outputs)
            raise InputError(
                f"'{net.name}' has {len(net.outputs)} outputs", got=f"-o {target.path}",
                expected=f"-o NAME=FILE for one of {outputs}",
                hint=(f"-o {net.outputs[-1]}={target.path}", f"-o {target.path.with_suffix(NPZ)} for all"),
            )  # fmt: skip
    if targets and len(named) == len(targets):
        return keep_outputs(net, list(dict.fromkeys(named)))
    if named:
        keep_outputs(net, named)  # names that are none are errors
    return net


def write_npz(path: Path, net: Network, names: Sequence[str], rows: int, read: ReadRows) -> None:
    """One array per named output, under its name."""
    with atomic_write(path) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name in names:
            row_type = net.types[name]
            dtype: Any = numpy_dtype(row_type.dtype)
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                member.write(npy_header((rows, *row_type.row_shape), dtype))
                for block in read():
                    member.write(unpack(block, net, name).astype(dtype.newbyteorder("<"), copy=False).tobytes())
