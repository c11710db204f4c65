"""onchip train: a new network, or an old one trained further."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from onchip.cli.options import Device, Json, Threads, Verbose
from onchip.cli.talk import Update, print_json, progress, rate, say, say_device
from onchip.errors import InputError

if TYPE_CHECKING:
    from onchip.train.loop import Progress


def train(
    model: Annotated[str, Argument(metavar="MODEL", help="digits (a new network), or a file to train further.")],
    output: Annotated[Path | None, Option("--output", "-o", help="The .onnx or .safetensors to write.")] = None,
    data: Annotated[str, Option(help="mnist, sklearn (8x8 digits, always there), or auto: the first found.")] = "auto",
    hidden: Annotated[
        str | None, Option(metavar="W,W", help="Hidden widths of a new network; 320,160 if not given.")
    ] = None,
    epochs: Annotated[int, Option(help="Passes over the data.")] = 30,
    batch_size: Annotated[int, Option(help="Rows an update.")] = 64,
    lr: Annotated[float, Option(help="Learning rate.")] = 0.03,
    momentum: Annotated[float, Option(help="0 is plain SGD.")] = 0.0,
    seed: Annotated[int, Option(help="Of the first weights and of the order of the rows.")] = 0,
    device: Device = "auto",
    threads: Threads = None,
    as_json: Json = False,
    verbose: Verbose = 0,
) -> None:
    """Train a classifier of digits and test it.

    \b
    Example:
      onchip train digits --data sklearn --epochs 5 -o digits.onnx

    Same seed, same machine kind: same bits. The file appears whole, after the last epoch, or not at all.
    """
    from onchip.spec.load import save
    from onchip.workloads import load
    from onchip.workloads.classify import check_model_path, train_and_test
    from onchip.workloads.digits import HIDDEN, load_data, network

    if output is not None:
        check_model_path(output)
    images = load_data(data)
    if model == "digits":
        net = network(images.side**2, HIDDEN if hidden is None else _widths(hidden), seed)
    elif hidden is None:
        net = load(model)
    else:
        raise InputError(
            "--hidden is for a new network", got=f"--hidden {hidden} with {model}", expected="no --hidden",
            hint=f"onchip train digits --hidden {hidden}",
        )  # fmt: skip
    counts = f"{len(images.x_train):,} rows to train on, {len(images.x_test):,} to test"
    say(f"data: {images.name}, {counts} ({images.where})")
    started = time.perf_counter()
    with progress(f"train {net.name}", epochs) as update:
        trained = train_and_test(
            net, images, lr=lr, momentum=momentum, batch_size=batch_size, epochs=epochs, seed=seed,
            device=device, threads=threads, on_progress=lambda p: show_epoch(p, update),
        )  # fmt: skip
    result = trained.fit
    say_device(result.chosen, result.plan, verbose, time.perf_counter() - started - result.seconds)
    if output is not None:
        save(trained.network, output)
        say(f"wrote {output}")
    samples_per_s = len(images.x_train) * epochs / result.seconds
    if as_json:
        print_json({
            "model": model, "data": images.name, "output": None if output is None else str(output),
            "device": result.chosen, "epochs": epochs, "batch_size": batch_size, "lr": lr, "momentum": momentum,
            "seed": seed, "epoch_losses": result.epoch_losses, "accuracy": trained.accuracy,
            "test_rows": len(images.x_test), "seconds": result.seconds, "ms_per_epoch": trained.ms_per_epoch,
            "samples_per_s": samples_per_s, "plan": result.plan.to_dict(),
        })  # fmt: skip
    else:
        loss = result.epoch_losses[-1]
        print(f"accuracy {trained.accuracy:.2%} on {len(images.x_test):,} test rows, training loss {loss:.4f}")
        print(f"{epochs} epochs, {trained.ms_per_epoch:.1f} ms/epoch, {rate(samples_per_s, 'samples')}")


def show_epoch(p: Progress, update: Update) -> None:
    text = f"epoch {p.epoch}/{p.epochs}  loss {p.loss:.4f}  {rate(p.samples_per_s, 'samples')}"
    update(p.epoch - 1 + p.step / p.steps, text)


def _widths(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise InputError(
            "bad hidden widths", got=f"'{text}'", expected="whole numbers above 0, with commas", hint="--hidden 320,160"
        )
    return tuple(int(part) for part in parts)
