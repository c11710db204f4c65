"""What a command line of `onchip run` requests: checked, and opened step by step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from onchip.cli.options import parse_shapes, parse_without
from onchip.cli.output import print_message
from onchip.errors import InputError, OnchipError

if TYPE_CHECKING:
    from onchip.formats.tables.kept_columns import KeptColumns
    from onchip.network.graph import Network
    from onchip.plan.kernel import Job
    from onchip.runtime.distributed.ranks import Ranks
    from onchip.runtime.io.output import PartialOutput
    from onchip.runtime.io.row_sources import FittedRows
    from onchip.runtime.io.targets import Target
    from onchip.runtime.run_job import RunOptions
    from onchip.text.text_rows import TextRows

STDIN = Path("-")
FACES_COUNT, WALK_COUNT = 64, 5  # images of faces, and random rows of a walk, if none are given


@dataclass(frozen=True)
class RunRequest:
    """The options of a run, by the names of the parameters of `run`."""

    model: str
    rows: Path | None
    text: list[str] | None
    column: str | None
    inputs: Sequence[str] | None
    shapes: list[str] | None
    padding: int | None
    keep: str | None
    output: Sequence[str] | None
    top: int | None
    weights: Path | None
    count: int | None
    seed: int | None
    grid: str | None
    walk: int | None
    device: str
    precision: str
    io: str
    threads: int | None
    batch: int | None
    scale: float | None
    without: Sequence[str] | None
    tables: str
    ranks: str | None
    gpus: str | None
    resume: bool
    deadline: float
    trace: Path | None
    stdin_copy: Path | None = None  # set: the rows of standard input

    @property
    def named(self) -> dict[str, Path]:
        """The files of --input, by input."""
        named: dict[str, Path] = {}
        for text in self.inputs or ():
            name, equals, file = text.partition("=")
            if not (name and equals and file) or name in named:
                expected = "NAME=FILE, each name once"
                raise InputError("bad --input", got=text, expected=expected, hint="--input lengths=lengths.npy")
            named[name] = Path(file)
        return named

    @property
    def targets(self) -> tuple[Target, ...]:
        """The files of --output."""
        from onchip.runtime.io.targets import parse_targets

        return parse_targets(self.output or ())

    @property
    def rows_file(self) -> Path | None:
        return self.stdin_copy or self.rows

    @property
    def has_tables(self) -> bool:
        from onchip.formats.tables.table_files import is_table

        return self.rows_file is not None and is_table(str(self.rows_file))

    @property
    def input_files(self) -> dict[str, Path]:
        """The files of the rows, by the name of their option."""
        from onchip.formats.tables.table_files import table_files

        if self.rows_file is None or not self.has_tables:
            return {} if self.rows_file is None else {"INPUT": self.rows_file}
        files = table_files(self.rows_file)
        return {"INPUT" if len(files) == 1 else f"INPUT ({file.path})": file.path for file in files}

    def kept(self) -> KeptColumns | None:
        """The columns of --keep."""
        from onchip.formats.tables.kept_columns import KeptColumns

        if self.keep is None:
            return None
        names = tuple(name for part in self.keep.split(",") if (name := part.strip()))
        if not self.has_tables:
            got = f"--keep {self.keep} with {self.rows or 'random rows'}"
            raise InputError(
                "--keep is for tables", got=got, expected="a .csv, .parquet or .arrow INPUT", hint="no --keep"
            )
        found = KeptColumns(str(self.rows_file), names)
        found.check()
        return found

    def checked(self, ranks: Ranks) -> RunRequest:
        """The same request, with names as onchip spells them and a copy of standard input."""
        from onchip.files import check_outputs, check_writable
        from onchip.runtime.distributed.supervise import check_started_once
        from onchip.runtime.io.output import check_output_suffix
        from onchip.runtime.io.stream import check_chunk
        from onchip.workloads import WORKLOADS, model_name

        model = model_name(self.model)
        self.check_rows()
        read = {f"--input {name}": path for name, path in self.named.items()}
        file = None if model in WORKLOADS else model
        rows = {} if self.rows == STDIN else self.input_files
        check_outputs(
            {"MODEL": file, **rows, "--weights": self.weights, **read},
            {
                **{
                    "--output" if i == 0 else f"--output {target}": target.path for i, target in enumerate(self.targets)
                },
                "--trace": self.trace,
            },
        )
        if self.trace is not None:
            check_writable(self.trace)
        for target in self.targets:
            check_output_suffix(target.path, self.rows == STDIN or self.has_tables)
        if self.batch is not None:
            check_chunk(self.batch)
        check_started_once(self.ranks, ranks)
        self.check_scale_out()
        copy = _copy_stdin() if self.rows == STDIN else None
        found = replace(self, without=parse_without(self.without), stdin_copy=copy)
        return found.with_model(found.has_text_file)

    @property
    def has_text_file(self) -> bool:
        """Whether INPUT is a file of texts, if the network reads texts."""
        from onchip.text.text_rows import SUFFIXES

        return self.rows_file is not None and self.rows_file.suffix.lower() in SUFFIXES

    def with_model(self, has_texts: bool) -> RunRequest:
        """The same request, with the model's name as onchip spells it; of texts, the path of a model that ships."""
        from onchip.text.shipped import SHIPPED
        from onchip.workloads import model_name

        model = model_name(self.model)
        is_workload = self.weights is not None or self.count is not None or self.inputs or self.padding is not None
        if has_texts and not is_workload and model in SHIPPED:
            model = str(SHIPPED[model])
        return replace(self, model=model)

    def with_count(self) -> RunRequest:
        """The same request, with the number of random rows that --grid, --walk and faces imply."""
        has_file = self.rows is not None or bool(self.inputs)
        if self.grid is not None:
            columns, lines = self.grid_size or (0, 0)
            given = "INPUT" if has_file else f"--count {self.count}" if self.count is not None else "--walk"
            if has_file or self.count is not None or self.walk is not None:
                got, hint = f"--grid {self.grid} and {given}", f"omit {given}, or omit --grid"
                raise InputError("--grid says how many random images", got=got, expected="--grid alone", hint=hint)
            return replace(self, count=columns * lines)
        if self.walk is not None and has_file:
            hint = "--count 5 --walk 12"
            raise InputError("--walk is for random rows", got="--walk with INPUT", expected="--count", hint=hint)
        if has_file or self.count is not None:
            return self
        if self.walk is not None:
            return replace(self, count=WALK_COUNT)
        return replace(self, count=FACES_COUNT) if self.model.lower() == "faces" else self

    @property
    def grid_size(self) -> tuple[int, int] | None:
        """Columns and lines of --grid."""
        if self.grid is None:
            return None
        columns, _, lines = self.grid.lower().partition("x")
        if not all(part.isascii() and part.isdecimal() and 0 < int(part) < 1 << 31 for part in (columns, lines)):
            raise InputError("bad --grid", got=self.grid, expected="columns x lines", hint="--grid 8x4")
        return int(columns), int(lines)

    def check_rows(self) -> None:
        files = [*([self.rows] if self.rows else []), *self.named.values()]
        if bool(files) == (self.count is not None):
            got = "neither" if self.count is None else f"{files[0]} and --count {self.count}"
            hint = "a file of rows, or --count 64 for random ones"
            raise InputError("choose the rows to run on", got=got, expected="INPUT or --count, one of them", hint=hint)
        if self.seed is not None and self.count is None:
            got, hint = f"--seed {self.seed} with {files[0]}", "leave it out: rows of a file are not random"
            raise InputError("--seed is for random rows", got=got, expected="--seed with --count", hint=hint)
        if self.padding is not None and self.count is not None:
            got, hint = f"--padding {self.padding} with --count {self.count}", "leave it out: random rows have none"
            raise InputError("--padding is for rows of a file", got=got, expected="INPUT", hint=hint)

    def check_scale_out(self) -> None:
        if self.ranks is not None and self.rows == STDIN:
            got, hint = f"--ranks {self.ranks} and standard input", "save it to a file first"
            raise InputError("ranks read rows from a file", got=got, expected="INPUT", hint=hint)
        if self.resume and not self.output:
            raise InputError("nothing to resume", got="no --output", expected="the -o of the interrupted run")
        if not self.deadline > 0:
            got, expected = f"{self.deadline:g}", "seconds, more than 0"
            raise InputError("bad deadline", got=got, expected=expected, hint="--deadline 120")

    def run_options(self) -> RunOptions:
        from onchip.runtime.run_job import RunOptions, parse_gpus

        gpus = () if self.gpus is None else parse_gpus(self.gpus)
        return RunOptions(self.device, self.threads, gpus, self.batch, self.deadline)

    def network(self) -> Network:
        from onchip.formats.tables.csv_writer import check_top
        from onchip.runtime.engine import apply_io
        from onchip.runtime.io.output import PICTURES
        from onchip.runtime.io.targets import needed_outputs
        from onchip.workloads.job import job_network

        has_lengths = self.padding is not None or "lengths" in self.named
        draws = bool(self.targets) and all(target.path.suffix.lower() in PICTURES for target in self.targets)
        shapes = parse_shapes(self.shapes)
        net = needed_outputs(
            job_network(self.model, self.weights, pixels=draws, lengths=has_lengths, shapes=shapes), self.targets
        )
        net = apply_io(net, self.io)
        if self.top is not None:
            check_top(self.top, net.meaning.classes)
        return net

    def job(self, rows: int) -> Job:
        """The job of all rows, not of a chunk or a rank.

        So work done once is amortised over all rows, and the plan and the bits do not depend on the number of ranks.
        """
        from onchip.plan.kernel import Job

        return Job(self.precision, max(1, rows), without=tuple(self.without or ()), tables=self.tables)

    @contextlib.contextmanager
    def open_sources(self, net: Network) -> Iterator[Sequence[FittedRows]]:
        """The rows of each input. Errors in the block about the copy of standard input name standard input."""
        from onchip.runtime.io.row_sources import (
            FittedRows,
            Source,
            WalkRows,
            input_files,
            open_inputs,
            padded_inputs,
            random_inputs,
        )

        if self.count is not None:
            kinds = net.inputs.values()
            drawn: Sequence[Source] = random_inputs(net, self.count, self.seed or 0)
            if self.walk is not None:
                drawn = [WalkRows(kind, self.count, self.walk, self.seed or 0) for kind in kinds]
            yield [FittedRows(source, kind, self.scale) for source, kind in zip(drawn, kinds, strict=True)]
            return
        if net.meaning.words and self.has_text_file:
            with _naming_stdin(self.stdin_copy):
                yield [FittedRows(self._texts(net), net.input)]
            return
        if self.column is not None:
            got, hint = f"--column {self.column} for {self.rows_file}", "a .csv, and a network that reads texts"
            raise InputError("--column is for texts", got=got, expected="no --column", hint=hint)
        with _naming_stdin(self.stdin_copy):
            counted = [padded_inputs(net)[1]] if self.padding is not None else []
            files = input_files(net, self.rows_file, self.named, counted)
            with open_inputs(net, files, self.scale, self.padding) as sources:
                yield sources

    def _texts(self, net: Network) -> TextRows:
        from onchip.text.text_rows import open_texts

        assert self.rows_file is not None
        # Standard input is lines, or a .csv if a column is named.
        is_table = self.column is not None if self.stdin_copy is not None else None
        return open_texts(self.rows_file, net, self.column, is_table)

    @contextlib.contextmanager
    def open_output(
        self, net: Network, job: Job, sources: Sequence[FittedRows], ranks: Ranks
    ) -> Iterator[PartialOutput | None]:
        """The output, if there is one; logs what an earlier run left of it, and what remains if it is not completed."""
        from onchip.runtime.io.output import KEEP_S, open_output

        # With several ranks, keep every chunk: if one rank dies, the launcher stops the others.
        keep_s = KEEP_S if ranks.size == 1 else 0.0
        record = self._record(net, job) if self.output else {}
        rows, parts = len(sources[0]), sources[0].parts
        sink = None
        try:
            kept, columns = self.kept(), self.grid_size[0] if self.grid_size else None
            with open_output(
                self.targets, net, rows, record, self.resume, keep_s, self.top, kept, parts, columns
            ) as sink:
                if sink is not None and sink.found:
                    print_message(_earlier_run(sink, self.resume))
                yield sink
        except BaseException:
            if sink is not None and sink.resume_hint:
                print_message(sink.resume_hint)
            raise

    def _record(self, net: Network, job: Job) -> dict[str, object]:
        from onchip.workloads.job import run_record

        files = {**self.input_files, **self.named}
        names = ("count", "seed", "walk", "scale", "padding", "io", "top", "column", "keep", "output")
        return run_record(self.model, net, files, job, {name: getattr(self, name) for name in names})


def _copy_stdin() -> Path:
    """Copy stdin to a file that is removed at exit; its first bytes determine the format."""
    import atexit
    import shutil
    import sys
    import tempfile

    begin = sys.stdin.buffer.read(6)
    if not begin:
        expected, hint = "rows as .csv, .npy or .npz", "cat table.csv | onchip run MODEL -"
        raise InputError("standard input is empty", got="no bytes", expected=expected, hint=hint)
    suffix = ".npy" if begin == b"\x93NUMPY" else ".npz" if begin.startswith(b"PK") else ".csv"
    with tempfile.NamedTemporaryFile(suffix=suffix, prefix="onchip-stdin-", delete=False) as file:
        path = Path(file.name)
        atexit.register(path.unlink, missing_ok=True)
        file.write(begin)
        shutil.copyfileobj(sys.stdin.buffer, file)
    return path


@contextlib.contextmanager
def _naming_stdin(path: Path | None) -> Iterator[None]:
    """In errors about this file, print "standard input" instead of its temporary path."""
    try:
        yield
    except OnchipError as error:
        if path is None or str(path) not in error.what:
            raise
        what = error.what.replace(str(path), "standard input")
        raise type(error)(what, got=error.got, expected=error.expected, hint=error.hint) from None


def _earlier_run(sink: PartialOutput, resume: bool) -> str:
    """The message about an earlier, incomplete run with the same output."""
    if not resume:
        return f"an earlier run did not complete {sink.path}: starting over (--resume would continue it)"
    if not sink.cuts:
        return f"nothing to resume: no chunk of {sink.path} is done"
    return f"resumed: {len(sink.records):,} of {len(sink.cuts):,} chunks are done"
