"""onchip train sentiment --folds N: cross-validate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from onchip.cli.output import print_json, print_message, progress, rate
from onchip.errors import InputError

if TYPE_CHECKING:
    from onchip.cli.train_config import Settings
    from onchip.network.graph import Network
    from onchip.train.options import TrainOptions
    from onchip.train.training_run import Progress
    from onchip.workloads.folds import Fold
    from onchip.workloads.table_data import Source
    from onchip.workloads.text_job import TextData
    from onchip.workloads.train_job import TrainJob

_OF_ONE_NETWORK = ("output", "log", "plot", "checkpoint", "resume", "debug")


def check_text_options(chosen: Settings, trained: Network | None) -> None:
    """InputError for an option that needs texts, or a single network, where there is none.

    trained  the network of a file that reads texts, if that is the model
    """
    from onchip.workloads.text_job import TEXTS

    def refuse(name: str, what: str, expected: str) -> None:
        if (value := getattr(chosen, name)) not in (None, False):
            name = name.replace("_", "-")
            got, hint = f"--{name} {value} with {chosen.model}", "omit it"
            raise InputError(f"--{name} is for {what}", got=got, expected=expected, hint=hint)

    if chosen.model == TEXTS or trained is not None:
        for name in ("hidden", "activation", "scale"):
            refuse(name, "tables", f"no --{name}")
        if chosen.output is not None and chosen.output.suffix.lower() != ".onnx":
            got, hint = f"-o {chosen.output}", f"-o {chosen.output.with_suffix('.onnx')}"
            raise InputError("a vocabulary is stored in ONNX", got=got, expected="a .onnx file", hint=hint)
    else:
        for name in ("column", "skip_bad"):
            refuse(name, "texts", f"onchip train {TEXTS}")
    if chosen.model != TEXTS:
        refuse("folds", "new networks for texts", f"onchip train {TEXTS}")
    if trained is not None:
        refuse("network", "new networks", "no --network")
    if chosen.folds is not None:
        for name in _OF_ONE_NETWORK:
            refuse(name, "a single network", "no --folds")
        if chosen.seeds > 1:
            got = f"--folds {chosen.folds} and --seeds {chosen.seeds}"
            raise InputError("two kinds of repetition", got=got, expected="one of them", hint="omit --seeds")


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
