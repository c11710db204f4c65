"""Arrays in .npz files: zip archives of .npy files, as numpy.savez writes them."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

from onchip.errors import FormatError, OnchipError
from onchip.files import free_memory, open_input
from onchip.formats.arrays.row_files import RowSource, rows_of_npy
from onchip.network.names import did_you_mean
from onchip.network.reading import naming_file, show


def open_npz(path: str | os.PathLike[str], name: str) -> RowSource:
    """Open the array of this name in an .npz file, or its only array."""
    source = Path(path)
    with open_input(source) as file, naming_file(source):
        try:
            with zipfile.ZipFile(file) as archive:
                member = archive.getinfo(_member(archive.namelist(), name))
                limit = free_memory() // 2
                if member.file_size > limit:
                    got, expected = f"{member.file_size:,} B", f"at most {limit:,} B"
                    hint = "numpy.save the rows to an .npy file: it is read in chunks"
                    raise FormatError("the array does not fit into memory", got=got, expected=expected, hint=hint)
                with archive.open(member) as packed:
                    data = packed.read(member.file_size + 1)
        except (OnchipError, OSError, MemoryError):
            raise
        except Exception as error:  # each compression method raises its own errors, and bad names others
            hint = "numpy.savez('rows.npz', x=rows)"
            raise FormatError("not an .npz file", got=str(error), expected="a zip archive", hint=hint) from None
        return RowSource(rows_of_npy(data), lambda: None)


def _member(members: list[str], name: str) -> str:
    arrays = [member.removesuffix(".npy") for member in members if member.endswith(".npy")]
    if name in arrays or len(arrays) == 1:
        return f"{name if name in arrays else arrays[0]}.npy"
    hint = did_you_mean(name, arrays) or f"numpy.savez('rows.npz', {name}=rows)"
    raise FormatError("the archive has no such array", got=show(arrays), expected=f"'{name}', or one array", hint=hint)
