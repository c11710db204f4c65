"""The output of a run: chunks of rows in any order, from one or many processes, that become a file when complete.

Until then the rows are stored in out.npy.partial, and out.npy.manifest records the job and the finished chunks: one
line each, a digest and its JSON, {"chunk": 3, "digest": ..}, written after the chunk's rows. A killed run resumes from
there. A chunk counts as done only if its line and its rows match their digests, whatever a crash left of either file.
The first line is checked against the current job; it holds no plan, only what planning needs to choose the same one
again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from onchip.errors import FormatError, InputError, OutputError
from onchip.files import check_writable, open_locked, open_owned, write_error
from onchip.formats.arrays.row_files import FlatWriter, NpyWriter, RowWriter, npy_header
from onchip.formats.gif import GifWriter
from onchip.formats.images import BmpWriter, PngWriter, is_image
from onchip.formats.tables.csv_writer import CsvWriter
from onchip.formats.tables.folder_writer import FolderWriter, check_folder
from onchip.formats.tables.kept_columns import KeptColumns
from onchip.formats.tables.parquet_writer import ParquetWriter
from onchip.formats.tables.rows_text import TextWriter
from onchip.network.graph import Network
from onchip.network.reading import fields, name_of, show, whole
from onchip.network.recipe import Array
from onchip.network.types import TensorType, numpy_dtype
from onchip.runtime.io.packed import stored_type, unpack
from onchip.runtime.io.slices import SliceFile, Slices, digest_rows, make_line, parse_line
from onchip.runtime.io.targets import NPZ, ReadRows, Target, write_npz

WRITERS: dict[str, type[RowWriter]] = {
    ".npy": NpyWriter, ".bin": FlatWriter, ".csv": CsvWriter, ".parquet": ParquetWriter,
    ".txt": TextWriter, ".bmp": BmpWriter, ".png": PngWriter, ".gif": GifWriter,
}  # fmt: skip
TILED = (".bmp", ".png")  # all rows in one picture
PICTURES = (*TILED, ".gif")
FOR_IMAGES = (".txt", *PICTURES)  # only for a network whose rows are images
TABLES = (".csv", ".parquet", "")  # "": a folder of tables
RAW_FORMATS = (".npy", ".bin")  # also the format of the unfinished output; others are converted when it is complete
VERSION = 6
Final = Callable[[ReadRows], None]
KEEP_S = 10.0  # since the first chunk: a shorter run is not worth resuming
COPY_BYTES = 8 << 20  # of rows converted to another format at a time


@dataclass(frozen=True)
class ChunkRecord:
    """A finished chunk, as the manifest records it."""

    chunk: int
    digest: str  # of the rows as stored in the file
    bad_rows: int = 0  # input rows that hold a NaN or an infinity
    first_bad_row: int | None = None


def check_output_suffix(path: Path, of_tables: bool = False) -> None:
    """Raise InputError for an output of an unknown format. Needs no network, so it can run before any work.

    of_tables  the rows are those of tables, whose results can be written as a folder
    """
    if path.suffix.lower() not in (*WRITERS, NPZ) and not (of_tables and _is_folder(path)):
        got = f"suffix '{path.suffix}'" if path.suffix else "no suffix"
        hint = f"-o {path.with_suffix('.npy')}" if path.name else "-o out.npy"
        expected = ", ".join((*WRITERS, NPZ))
        raise InputError(f"cannot write {path}: unknown format", got=got, expected=expected, hint=hint)


def _is_folder(path: Path) -> bool:
    """Whether the results of tables are written as a folder with this name."""
    return path.is_dir() or not path.suffix


@contextlib.contextmanager
def open_output(
    path: Path | Sequence[Target],
    net: Network,
    rows: int,
    job: Mapping[str, Any] | None = None,
    resume: bool = False,
    keep_s: float = KEEP_S,
    top: int | None = None,
    kept: KeptColumns | None = None,
    parts: Sequence[tuple[str, int]] = (),
    columns: int | None = None,
) -> Iterator[PartialOutput | None]:
    """The output for the results of `rows` rows; the file appears if the block succeeds. None without a path.

    path    a file, or several, or none
    job     everything that determines the results, as JSON: only a run of the same job can resume
    resume  keep the chunks that an earlier run of this job finished
    keep_s  chunks of a run that is stopped sooner are deleted
    top     classes per row in a table, if the network has class names
    kept    columns of the input tables that a table of results begins with
    parts   name and number of rows of each input table: the tables of results in a folder
    columns images per line of a .png or .bmp; None: a square

    Problems that will prevent writing are raised now, not after the work.
    """
    targets = (Target(path),) if isinstance(path, Path) else tuple(path)
    if not targets:
        yield None
        return
    made = [_final(target, net, rows, top, kept, parts, columns) for target in targets]
    is_raw = len(targets) == 1 and targets[0].path.suffix.lower() in RAW_FORMATS and len(net.outputs) == 1
    finals = () if is_raw else made
    output = PartialOutput(targets[0].path, stored_type(net), rows, finals, dict(job or {}), resume, keep_s)
    try:
        yield output
        output.finish()
    except BaseException as error:
        output.leave(error)
        raise
    finally:
        output.close()


def _final(
    target: Target, net: Network, rows: int, top: int | None, kept: KeptColumns | None,
    parts: Sequence[tuple[str, int]], columns: int | None,
) -> Final:  # fmt: skip
    """Writes the stored rows to a target when they are complete; raises now if that is impossible."""
    path = target.path
    check_output_suffix(path, bool(parts))
    suffix = "" if parts and _is_folder(path) else path.suffix.lower()
    if kept is not None and suffix not in TABLES:
        got, hint = f"--keep with {path}", f"-o {path.with_suffix('.csv')}"
        raise InputError("kept columns need a table", got=got, expected=".csv, .parquet or a folder", hint=hint)
    if suffix == NPZ:
        check_writable(path)
        return functools.partial(write_npz, path, net, [target.name] if target.name else net.outputs, rows)
    name = target.name or net.outputs[0]
    row_type = net.types[name]
    if suffix in FOR_IMAGES and not is_image(row_type):
        others = ", ".join(kind for kind in WRITERS if kind not in FOR_IMAGES)
        raise InputError(
            f"cannot write {path}: '{net.name}' does not output images", got=f"rows {row_type}, format {suffix}",
            expected=f"rows (H, W, 3), (H, W, 1) or (H, W) for {suffix}, or one of {others}",
            hint=f"-o {path.with_suffix('.npy')}",
        )  # fmt: skip
    make: Any = functools.partial(FolderWriter, parts=parts) if suffix == "" else WRITERS[suffix]
    if suffix in TABLES:
        classes = net.meaning.classes if len(net.outputs) == 1 else ()
        make = functools.partial(make, classes=classes, top=top or 1, kept=kept)
    if suffix in TILED and columns is not None:
        make = functools.partial(make, columns=columns)
    make = functools.partial(make, path, (rows, *row_type.row_shape), numpy_dtype(row_type.dtype))
    make()  # raises if the format cannot hold them
    check_folder(path) if suffix == "" else check_writable(path)

    def write(read: ReadRows) -> None:
        with make() as writer:
            for block in read():
                writer.write(unpack(block, net, name))

    return write


class PartialOutput:
    """An unfinished output. `begin` it, `write` chunks, `record` them; open_output finishes it.

    t       of the stored rows
    finals  write the complete rows to the files; none: the stored rows are the file
    """

    def __init__(
        self,
        path: Path,
        t: TensorType,
        rows: int,
        finals: Sequence[Final],
        job: dict[str, Any],
        resume: bool,
        keep_s: float,
    ) -> None:
        self._finals, self._keep_s = tuple(finals), keep_s
        self.path, self.records = path, dict[int, ChunkRecord]()
        self.plan: Mapping[str, Any] = {}  # a plan_record; that of an earlier run is unchecked
        self.cuts: tuple[int, ...] = ()  # first row of each chunk
        self.data_path, self.manifest_path = (Path(f"{path}.{end}") for end in ("partial", "manifest"))
        is_npy = path.suffix.lower() == ".npy" and not finals
        head = npy_header((rows, *t.row_shape), numpy_dtype(t.dtype)) if is_npy else b""
        self._head, self._job = head, json.loads(json.dumps(job))
        token = os.urandom(8).hex()
        self.slices = Slices(str(self.data_path.absolute()), len(head), (rows, *t.row_shape), t.dtype, token)
        self._file: SliceFile | None = None
        self._first_record_s, self._has_begun, self.is_resumed = 0.0, False, False
        self.found = True
        try:
            self._manifest = self._lock_manifest()
            self.found = bool(self._manifest.read(1)) or self.data_path.exists()  # files of an earlier run
            if resume:
                self._read_manifest()
            open_owned(self.data_path).close()  # anything else with this name is refused now, not after the work
        except BaseException as error:
            if hasattr(self, "_manifest"):
                is_new = not self.found and not self.data_path.is_symlink()
                if is_new and not isinstance(error, Exception):  # Ctrl-C, SIGTERM
                    self._remove()
                self.close()
            self._remove_empty_manifest()
            raise

    def begin(self, plan: Mapping[str, Any], cuts: tuple[int, ...]) -> None:
        """Prepare the files for chunks that begin at these rows; a resumed run keeps its finished chunks.

        plan  what a resumed run needs to choose the same plan, as JSON
        """
        self._has_begun = True
        if not self.is_resumed:
            self.plan, self.cuts = plan, cuts
            head = {"version": VERSION, "token": self.slices.token, "job": self._job, "plan": plan, "cuts": cuts}
            try:
                with open_owned(self.data_path) as data:
                    data.truncate(0)
                self._manifest.truncate(0)
                self._append(head)
                os.fsync(self._manifest.fileno())  # ranks on other machines read it
            except OSError as error:
                raise write_error(self.data_path, error) from None
        if self._file is None:
            self._file = SliceFile(self.slices)
        self._file.write_head(self._head)

    def write(self, start: int, rows: Array) -> str:
        assert self._file is not None
        return self._file.write(start, rows)

    def read(self, start: int, stop: int) -> Array:
        assert self._file is not None
        return self._file.read(start, stop)

    def record(self, record: ChunkRecord) -> None:
        """Record that a chunk is done; its rows must be written."""
        if not self.records:
            self._first_record_s = time.monotonic()
        self.records[record.chunk] = record
        self._append(asdict(record))

    # -- the end -------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """All chunks are done: create the file."""
        if self._file is None or len(self.records) < len(self.cuts):
            got, expected = f"{len(self.records)} chunks", f"{len(self.cuts)}"
            raise InputError(f"wrong number of rows for {self.path}", got=got, expected=expected)
        self._file.sync()
        try:
            if not self._finals:
                os.replace(self.data_path, self.path)
            for final in self._finals:
                final(self._read_all)
        except OSError as error:
            raise write_error(self.path, error) from None
        self._remove()

    def _read_all(self) -> Iterator[Array]:
        """All stored rows, some at a time."""
        rows, step = self.slices.shape[0], max(1, COPY_BYTES // max(1, self.slices.row_bytes))
        for start in range(0, rows, step):
            yield self.read(start, min(start + step, rows))

    def leave(self, error: BaseException) -> None:
        """The run ended with this error: keep the finished chunks only if another run can use them."""
        if not self._has_begun:
            is_reusable = self.found
        elif self.is_resumed:
            is_reusable = bool(self.records)
        else:  # after an input error the rows must change, which makes it another job
            is_stopped = not isinstance(error, Exception)  # Ctrl-C, SIGTERM
            is_short = is_stopped and time.monotonic() - self._first_record_s < self._keep_s
            is_reusable = bool(self.records) and not is_short and not isinstance(error, InputError)
        if not is_reusable:
            self._remove()

    @property
    def resume_hint(self) -> str:
        """How to continue from the finished chunks, as a message; "" if there are none."""
        if not (self.records and self.manifest_path.exists()):
            return ""
        return f"{len(self.records):,} of {len(self.cuts):,} chunks are saved in {self.data_path}: continue: --resume"

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._manifest.close()  # releases its lock

    def _remove(self) -> None:
        for path in (self.data_path, self.manifest_path):
            with contextlib.suppress(OSError):
                path.unlink()

    def _remove_empty_manifest(self) -> None:
        """Remove what this run created before it failed or was stopped; a locked manifest is another run's."""
        with contextlib.suppress(OSError, OutputError):
            if (file := open_locked(self.manifest_path)) is not None:
                if not file.read(1):
                    self.manifest_path.unlink(missing_ok=True)
                file.close()

    # -- the manifest --------------------------------------------------------------------------------------

    def _lock_manifest(self) -> io.FileIO:
        file = open_locked(self.manifest_path)
        if file is None:
            hint = "wait for it, or choose another name"
            raise OutputError(f"another run is writing {self.path}", got=str(self.manifest_path), hint=hint)
        return file

    def _append(self, line: Mapping[str, Any]) -> None:
        """Write a line at once: a crash leaves at most the last line incomplete."""
        try:
            self._manifest.seek(0, os.SEEK_END)
            self._manifest.write(make_line(line))
        except OSError as error:
            raise write_error(self.manifest_path, error) from None

    def _read_manifest(self) -> None:
        """Load the finished chunks of an earlier run of the same job."""
        self._manifest.seek(0)
        first, *others = self._manifest.readall().split(b"\n")
        if not others or not self.data_path.exists():  # the run ended before its first chunk
            return
        with self.manifest_errors():
            head = parse_line(first)
            if not head:
                raise FormatError("its first line has changed", got="another digest", expected="its digest")
            fields(head, ("version", "token", "job", "plan", "cuts"), "its first line")
            whole(head["version"], "version", VERSION, VERSION)
            self._check_job(head["job"])
            self._check_cuts(head["cuts"])
            for name, kind, expected in (("token", str, "a string"), ("plan", dict, "an object")):
                if not isinstance(head[name], kind):
                    raise FormatError(f"'{name}' has the wrong type", got=name_of(head[name]), expected=expected)
        self.is_resumed = True
        self.plan, self.cuts = head["plan"], tuple(head["cuts"])
        self.slices = replace(self.slices, token=head["token"])
        self._file = SliceFile(self.slices)
        for line in others:
            with contextlib.suppress(FormatError):  # damaged or truncated: the chunk is run again
                record = self._checked(parse_line(line))
                self.records[record.chunk] = record

    @contextlib.contextmanager
    def manifest_errors(self) -> Iterator[None]:
        """Report a FormatError of the block as a damaged manifest."""
        try:
            yield
        except FormatError as error:
            got = f"{error.what}: {error.got}" + (f", expected {error.expected}" if error.expected else "")
            raise FormatError(
                f"{self.manifest_path} is damaged", got=got, expected="a manifest written by this version of onchip",
                hint="start over without --resume",
            ) from None  # fmt: skip

    def _check_job(self, job: Any) -> None:
        fields(job, tuple(self._job), "its job")
        if other := [name for name in self._job if job[name] != self._job[name]]:
            raise InputError(
                f"{self.manifest_path} belongs to another job",
                got=", ".join(f"{name}: {show(self._job[name])}" for name in other),
                expected=", ".join(f"{name}: {show(job[name])}" for name in other),
                hint="repeat the original command, or start over without --resume",
            )  # fmt: skip

    def _check_cuts(self, cuts: Any) -> None:
        rows = self.slices.shape[0]
        if not isinstance(cuts, list) or bool(cuts) != bool(rows):
            got = f"{len(cuts)} chunks" if isinstance(cuts, list) else name_of(cuts)
            raise FormatError("'cuts' is invalid", got=got, expected=f"the first row of each chunk of {rows:,} rows")
        low = high = 0  # the first chunk must begin at row 0
        for cut in cuts:
            low, high = whole(cut, "a cut", low, high) + 1, rows - 1

    def _checked(self, entry: dict[str, Any]) -> ChunkRecord:
        """The record of a chunk whose rows match; FormatError if it is invalid."""
        fields(entry, tuple(field.name for field in dataclasses.fields(ChunkRecord)), "a chunk")
        chunk = whole(entry["chunk"], "its index", 0, len(self.cuts) - 1)
        start, stop = (*self.cuts, self.slices.shape[0])[chunk : chunk + 2]
        if whole(entry["bad_rows"], "bad_rows", 0, stop - start):
            whole(entry["first_bad_row"], "first_bad_row", start, stop - entry["bad_rows"])
        elif entry["first_bad_row"] is not None:
            raise FormatError("'first_bad_row' is invalid", got=name_of(entry["first_bad_row"]), expected="null")
        assert self._file is not None
        if digest_rows(self._file.read_bytes(start, stop)) != entry["digest"]:
            raise FormatError("its rows have changed", got="another digest", expected=name_of(entry["digest"]))
        return ChunkRecord(**entry)
