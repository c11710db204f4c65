"""onchip train sentiment --folds N: cross-validate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from onchip.cli.output import print_json, print_message, progress, rate
from onchip.errors import InputError

if TYPE_CHECKING:
    from onchip.cli.train_config import Settings
    from onchip.train.options import TrainOptions
    from onchip.train.training_run import Progress
    from onchip.workloads.folds import Fold
    from onchip.workloads.table_data import Source
    from onchip.workloads.text_job import TextData
    from onchip.workloads.train_job import TrainJob

_OF_ONE_NETWORK = ("output", "log", "plot", "checkpoint", "resume", "debug")


def check_text_options(chosen: Settings) -> None:
    """InputError for an option that needs texts, or a single network, where there is none."""
    from onchip.workloads.text_job import TEXTS

    for name in ("folds",) if chosen.model != TEXTS else ():
        if (value := getattr(chosen, name)) is not None:
            got = f"--{name} {value} with {chosen.model}"
            raise InputError(f"--{name} is for texts", got=got, expected=f"onchip train {TEXTS}", hint="omit it")
    for name in ("hidden", "activation", "scale") if chosen.model == TEXTS else ():
        if getattr(chosen, name) is not None:
            got = f"--{name} with {TEXTS}"
            raise InputError(
                f"--{name} is for tables", got=got, expected=f"no --{name}", hint="--network, for its layers"
            )
    if chosen.model == TEXTS and chosen.output is not None and chosen.output.suffix.lower() != ".onnx":
        got, hint = f"-o {chosen.output}", f"-o {chosen.output.with_suffix('.onnx')}"
        raise InputError("a vocabulary is stored in ONNX", got=got, expected="a .onnx file", hint=hint)
    for name in _OF_ONE_NETWORK if chosen.folds is not None else ():
        if getattr(chosen, name):
            raise InputError(f"--{name} is for a single network", got=f"--{name} and --folds {chosen.folds}",
                             expected="one of them", hint=f"omit --{name}")  # fmt: skip
    if chosen.folds is not None and chosen.seeds > 1:
        raise InputError("two kinds of repetition", got=f"--folds {chosen.folds} and --seeds {chosen.seeds}",
                         expected="one of them", hint="omit --seeds")  # fmt: skip


def check_seeds(seeds: int, job: TrainJob) -> None:
    """InputError for several seeds with a validation set: they hold out a share of the training rows."""
    if seeds > 1 and job.validation is not None:
        got, hint = f"--seeds {seeds}, and {job.data.name} with a .dev file", "--data FILE.train --test-data FILE.test"
        raise InputError("seeds have no validation set", got=got, expected="one of them", hint=hint)


def train_folds(
    chosen: Settings, source: Source, options: Mapping[str, Any], as_json: bool, ranks: int
) -> None:  # fmt: skip
    """Train and test one network per fold; print each accuracy, their mean and standard deviation."""
    from onchip.workloads.folds import cross_validate, results_document
    from onchip.workloads.text_job import KIM

    assert chosen.folds is not None
    if ranks > 1:
        raise InputError("folds run in one process", got=f"{ranks} ranks", expected="one", hint="omit --ranks")
    used: dict[str, Any] = {}
    with progress(f"train {chosen.folds} networks", chosen.folds) as update:

        def start(data: TextData, given: TrainOptions) -> None:
            used.update({"model": chosen.model, "data": data.name, "network": chosen.network or KIM, **asdict(given)})
            for note in (f"data: {data.name}, {len(data.train.texts):,} texts ({data.where})", *data.notes):
                print_message(note)

        def show(done: int, p: Progress) -> None:
            part = (p.epoch - 1 + p.step / p.steps) / p.epochs
            update(done + part, f"fold {done + 1}  epoch {p.epoch}/{p.epochs}  {rate(p.samples_per_s, 'samples')}")

        def show_fold(fold: Fold) -> None:
            print_message(f"fold {fold.fold}: accuracy {fold.accuracy:.2%} on {fold.test_rows:,} texts, "
                          f"epoch {fold.best_epoch} of {fold.epochs}, {fold.seconds:.0f} s")  # fmt: skip

        results = cross_validate(
            source, options, chosen.folds, chosen.network or KIM, device=chosen.device, threads=chosen.threads,
            on_start=start, on_progress=show, on_fold=show_fold,
        )  # fmt: skip
    if as_json:
        print_json({**used, **results_document(results)})
        return
    mean, deviation = results.accuracy
    print(f"accuracy {mean:.2%} +- {deviation:.2%} over {chosen.folds} folds")
