"""onchip train faces: train a generator of pictures on pictures of one's own."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onchip.cli.output import (
    Update,
    print_json,
    print_message,
    progress,
    rate,
    resumable,
    terminal_width,
)
from onchip.errors import InputError
from onchip.network.text import plural

if TYPE_CHECKING:
    from onchip.formats.pictures import Pictures
    from onchip.workloads.gan_job import GanProgress, GanResult
    from onchip.workloads.gan_training import GanOptions, GanRun

MODEL = "faces"
ONLY_HERE = ("width", "samples", "augment", "flip")  # options that no other model has
OPTIONS = (
    "model", "output", "data", "lr", "ema", "batch_size", "epochs", "seed", "device", "threads", "checkpoint",
    "checkpoint_every", "resume", "skip_bad", *ONLY_HERE,
)  # fmt: skip
_STEPS = 10_000  # of a run without --epochs
_SKIPPED_SHOWN = 3


def refuse_others(model: str, given: Mapping[str, Any]) -> None:
    """InputError for an option that this model does not have.

    given  all options of the command line by name; None: not given
    """
    names = [name for name, value in given.items() if value is not None]
    wrong = [name for name in names if (name not in OPTIONS if model == MODEL else name in ONLY_HERE)]
    if wrong:
        option = f"--{wrong[0].replace('_', '-')}"
        expected = (
            ", ".join(f"--{name.replace('_', '-')}" for name in OPTIONS[1:]) if model == MODEL else f"no {option}"
        )
        hint = f"omit {option}" if model == MODEL else "onchip train faces --data FOLDER"
        raise InputError(f"{option} is not an option of {model}", got=option, expected=expected, hint=hint)


def check_no_faces(model: str) -> None:
    """InputError for the model of a config file that is faces."""
    if model == MODEL:
        got, hint = "model = 'faces' in a config file", "onchip train faces --data FOLDER"
        raise InputError("faces has no config file", got=got, expected="its options", hint=hint)


def train_faces(given: Mapping[str, Any], as_json: bool, verbose: int) -> None:
    """given  the options of the command line by name; None: not given"""
    from onchip.files import check_outputs
    from onchip.formats.load import save
    from onchip.workloads.classify import check_folder, check_model_path
    from onchip.workloads.gan_job import train_gan
    from onchip.workloads.gan_training import GanRun

    refuse_others(MODEL, given)
    found = {name: value for name, value in given.items() if value is not None}
    output, samples, folder = (found.get(name) for name in ("output", "samples", "checkpoint"))
    _check_checkpoint(found)
    data = _source(found.get("data"))
    states = [] if folder is None else [folder, *folder.glob("checkpoint-*")]
    check_outputs(
        {"--data": data},
        {"--output": output, "--samples": samples, **{f"--checkpoint ({path})": path for path in states}},
    )
    for check, path in ((check_model_path, output), (_check_samples, samples), (check_folder, folder)):
        if path is not None:
            check(path)
    pictures = _pictures(data, found.get("skip_bad", False))
    options = _options(found, pictures)
    where = {name: found[name] for name in ("device", "threads") if name in found}
    run = GanRun(pictures.images, options, **where)
    _say_job(run, verbose)
    kept = {"checkpoint": folder, "resume": found.get("resume", False), "samples": samples}
    kept |= {"checkpoint_every": found["checkpoint_every"]} if "checkpoint_every" in found else {}
    with resumable(f"onchip train {MODEL}", folder), progress(f"train {MODEL}", options.epochs) as update:
        result = train_gan(run, on_progress=lambda p: show_progress(p, update), **kept)
    if output is not None:
        save(result.network, output)
        print_message(f"wrote {output}")
    if samples is not None:
        print_message(f"wrote {samples} and {samples.with_suffix('.gif')}: synthetic pictures")
    if as_json:
        print_json(_document(run, options, pictures, data, result))
        return
    _print_result(options, run, result)


def _check_checkpoint(found: Mapping[str, Any]) -> None:
    for name in ("resume", "checkpoint_every"):
        if found.get(name) and "checkpoint" not in found:
            option = f"--{name.replace('_', '-')}"
            raise InputError(
                "no folder for checkpoints", got=f"{option} without --checkpoint", expected="--checkpoint too",
                hint=f"--checkpoint DIR {option}",
            )  # fmt: skip


def _check_samples(path: Path) -> None:
    from onchip.files import check_writable

    if path.suffix.lower() != ".png":
        got, hint = f"suffix '{path.suffix}'", f"--samples {path.with_suffix('.png')}"
        raise InputError(f"cannot write {path}: unknown format", got=got, expected=".png", hint=hint)
    for each in (path, path.with_suffix(".gif")):
        check_writable(each)


def _source(data: str | None) -> Path:
    """The folder or file of --data; for mnist, that of its training images."""
    from onchip.workloads.digits import find_mnist, mnist_files

    if data is None:
        expected = "a folder of .png and .jpg files, an .npz, .npy or idx file, or mnist"
        raise InputError("no pictures to train on", got="no --data", expected=expected, hint="--data FOLDER")
    if data.lower() == "mnist" and not Path(data).exists():
        folder = find_mnist()
        if folder is None:
            hint = "onchip data mnist, or ONCHIP_DATA=the folder of mnist/"
            raise InputError("the MNIST files are missing", got="no mnist folder", expected="its images", hint=hint)
        return mnist_files(folder)[0]
    return Path(data)


def _pictures(data: Path, skip_bad: bool) -> Pictures:
    from onchip.formats.pictures import read_pictures

    pictures = read_pictures(data, skip_bad)
    count, height, width, colours = pictures.images.shape
    kind = "colour" if colours == 3 else "gray"
    print_message(f"data: {data}: {count:,} {kind} pictures of {width} x {height} pixels")
    if pictures.skipped:
        shown = "; ".join(pictures.skipped[:_SKIPPED_SHOWN]) + "; ..." * (len(pictures.skipped) > _SKIPPED_SHOWN)
        print_message(f"skipped {plural(len(pictures.skipped), 'file')}: {shown}")
    if height != width:
        got, hint = f"{width} x {height} pixels", "crop them to squares"
        raise InputError("the pictures are not square", got=got, expected="the same width and height", hint=hint)
    return pictures


def _options(found: Mapping[str, Any], pictures: Pictures) -> GanOptions:
    from onchip.workloads.gan_training import FEW_PICTURES, HELD_SHARE, GanOptions

    count, colours = len(pictures.images), pictures.images.shape[-1]
    names = ("width", "batch_size", "epochs", "lr", "ema", "seed", "augment", "flip")
    options = {"augment": count < FEW_PICTURES, "flip": colours == 3}
    options |= {name: found[name] for name in names if name in found}
    rows = max(1, round(count * (1 - HELD_SHARE)))
    steps = max(1, rows // max(1, options.get("batch_size", GanOptions.batch_size)))
    return GanOptions(**{"epochs": -(-_STEPS // steps), **options})


def _say_job(run: GanRun, verbose: int) -> None:
    from sys import stderr

    o = run.options
    network = (
        f"generator of {run.parameters[0]:,} parameters, discriminator of {run.parameters[1]:,} (--width {o.width})"
    )
    print_message(f"device: {run.chosen}\n{network}")
    changed = " and ".join(filter(None, ["shifted, cut and brightened" * o.augment, "mirrored" * o.flip]))
    print_message(f"pictures are {changed} at random" if changed else "pictures are not changed")
    if verbose:
        for plan in run.plans.values():
            print_message(plan.text(terminal_width(stderr)))


def show_progress(p: GanProgress, update: Update) -> None:
    losses = f"losses: discriminator {p.d_loss:.3f}, generator {p.g_loss:.3f}"
    speed = rate(p.pictures_per_s, "pictures")
    update(p.epochs_done, f"epoch {math.ceil(p.epochs_done)}/{p.epochs}  {losses}  {speed}")


def _document(run: GanRun, options: GanOptions, pictures: Pictures, data: Path, result: GanResult) -> dict[str, Any]:
    from datetime import date

    from onchip import __version__

    losses = [{"discriminator": d, "generator": g} for d, g in result.epoch_losses]
    return {
        "model": MODEL, "version": __version__, "date": date.today().isoformat(), "data": data,
        "pictures": len(pictures.images), "skipped": list(pictures.skipped),
        "held_out": len(run.held), **asdict(options), "device": run.chosen, "parameters": run.parameters,
        "epoch_losses": losses, "frechet": asdict(result.score), "seconds": result.seconds,
        "plans": {name: plan.to_dict() for name, plan in run.plans.items()},
    }  # fmt: skip


def _print_result(options: GanOptions, run: GanRun, result: GanResult) -> None:
    s, (d_loss, g_loss) = result.score, result.epoch_losses[-1]
    print(f"losses of the last epoch: discriminator {d_loss:.4f}, generator {g_loss:.4f}")
    print(
        f"Frechet distance {s.generated:.3g} to {s.held_out:,} held-out pictures "
        f"(the training pictures: {s.training:.3g}, noise: {s.noise:.3g})"
    )
    print(f"by {s.features} features of a small CNN that onchip trained on these pictures: not the FID of papers")
    print(
        f"the most similar training picture differs by {s.nearest_generated:.3g} of 255 from a generated one, by "
        f"{s.nearest_held_out:.3g} from a held-out one"
    )
    print(f"{plural(options.epochs, 'epoch')} of {plural(run.steps_per_epoch, 'step')}, {result.seconds:.1f} s")
