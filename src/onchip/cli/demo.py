"""onchip demo: train, save, load, plan, run and time one network."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from typer import Option

from onchip.cli.options import Json
from onchip.cli.talk import columns_of, print_json, progress, rate, say
from onchip.cli.train import show_epoch
from onchip.network.text import fitted_columns, plural


def demo(
    out: Annotated[Path, Option(metavar="DIR", help="Where the network and the picture go.")] = Path("onchip-demo"),
    epochs: Annotated[int, Option(help="Passes over the training images.")] = 30,
    rows: Annotated[int, Option(help="Rows to time: the test images over and over.")] = 20_000,
    as_json: Json = False,
) -> None:
    """Train a network, save, load, plan, run and time it.

    \b
    Example:
      onchip demo

    Takes some 20 seconds the first time, when kernels are compiled, then fewer. Needs no internet and no GPU: the
    images of digits are a part of onchip.
    """
    from onchip.workloads.demo import check_rows_to_time, draw, plan_beside, save_and_load, time_rows, train_digits

    check_rows_to_time(rows)
    say("onchip demo: trains, saves, loads, runs and times a small network; the first time about 20 s")
    with progress("train digits", epochs) as update:
        data, trained = train_digits(out, epochs, lambda p: show_epoch(p, update))
    say(f"device to train on: {trained.fit.chosen}")
    taken = f"{plural(epochs, 'epoch')} in {trained.fit.seconds:.2f} s"
    say(f"trained a network on {len(data.x_train):,} images of digits: {taken}")
    engine, files = save_and_load(out, trained.network, data.x_test, rows)
    say(f"saved it and loaded it again: {', '.join(map(str, files))}\ndevice: {engine.chosen}")
    with progress(f"time {rows:,} rows", 1) as update:
        timings = time_rows(engine, data.x_test, rows, update)
    plan, too_low = plan_beside(engine.plan, timings[0].median_ms)
    say("\n".join(filter(None, [f"\n{plan.text(columns_of(sys.stderr))}", too_low])) + "\n")
    where = ", ".join(f"{t.engine.partition(',')[0]} on {t.device}" for t in timings)
    say(f"checked against float64, then timed in turns, from NumPy array to NumPy array: {where}")
    picture = draw(out, data, trained)
    if as_json:
        print_json({
            "device": engine.chosen, "epochs": epochs, "train_seconds": trained.fit.seconds,
            "epoch_losses": trained.fit.epoch_losses, "accuracy": trained.accuracy, "test_rows": len(data.x_test),
            "rows": rows, "timings": [asdict(timing) for timing in timings], "plan": plan.to_dict(),
            "files": [str(path) for path in files], "picture": str(picture),
        })  # fmt: skip
    else:
        print(f"accuracy {trained.accuracy:.2%} on {len(data.x_test)} test images")
        head = [f"{rows:,} rows", "on", "ms (p20-p80)", "rate", "onchip is", "max error"]
        cells = [
            [t.engine, t.device, f"{t.median_ms:.2f} ({t.p20_ms:.2f}-{t.p80_ms:.2f})", rate(rows / t.median_ms * 1e3),
             f"{t.median_ms / timings[0].median_ms:.2f}x as fast" if i else "", f"{t.error:.1e}"]
            for i, t in enumerate(timings)
        ]  # fmt: skip
        print(fitted_columns(head, cells, columns_of(sys.stdout), right=(2, 3, 4, 5)))
    say(f"picture: {picture}")
