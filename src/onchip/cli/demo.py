"""onchip demo: train, save, load, plan, run and time one network."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from typer import Option

from onchip.cli.debug import Debug, check_launches, warn_of_times
from onchip.cli.options import Json
from onchip.cli.output import print_json, print_message, progress, rate, terminal_width
from onchip.cli.train import show_epoch
from onchip.network.text import fitted_columns, plural


def demo(
    out: Annotated[Path, Option(metavar="DIR", help="Folder for the network and the picture.")] = Path("onchip-demo"),
    epochs: Annotated[int, Option(help="Passes over the training images.")] = 30,
    rows: Annotated[int, Option(help="Rows to time: the test images, repeated.")] = 20_000,
    debug: Debug = False,
    as_json: Json = False,
) -> None:
    """Train, save, load and time a network; score a sentence; draw faces.

    \b
    Example:
      onchip demo

    The first run takes about 20 seconds because it compiles kernels; later runs are shorter. Needs no internet and no
    GPU: the images of digits are bundled.
    """
    from onchip.workloads.demo import (
        SENTENCE,
        check_rows_to_time,
        draw,
        draw_faces,
        plan_with_floor,
        save_and_load,
        score_sentence,
        time_rows,
        train_digits,
    )

    check_rows_to_time(rows)
    check_launches(debug)
    warn_of_times(debug)
    print_message("onchip demo: trains, saves, loads, runs and times a small network; the first run takes about 20 s")
    with progress("train digits", epochs) as update:
        data, trained = train_digits(out, epochs, lambda p: show_epoch(p, update))
    print_message(f"training device: {trained.fit.chosen}")
    duration = f"{plural(epochs, 'epoch')} in {trained.fit.seconds:.2f} s"
    print_message(f"trained a network on {len(data.x_train):,} images of digits: {duration}")
    engine, files = save_and_load(out, trained.network, data.x_test, rows)
    print_message(f"saved and loaded: {', '.join(map(str, files))}\ndevice: {engine.chosen}")
    with progress(f"time {rows:,} rows", 1) as update:
        timings = time_rows(engine, data.x_test, rows, update)
    plan, too_low = plan_with_floor(engine.plan, timings[0].median_ms)
    print_message("\n".join(filter(None, [f"\n{plan.text(terminal_width(sys.stderr))}", too_low])) + "\n")
    where = ", ".join(f"{t.engine.partition(',')[0]} on {t.device}" for t in timings)
    print_message(f"checked against float64, then timed alternately, from NumPy array to NumPy array: {where}")
    picture, faces = draw(out, data, trained), draw_faces(out)
    label, share = score_sentence(SENTENCE)
    if as_json:
        print_json({
            "device": engine.chosen, "epochs": epochs, "train_seconds": trained.fit.seconds,
            "epoch_losses": trained.fit.epoch_losses, "accuracy": trained.accuracy, "test_rows": len(data.x_test),
            "rows": rows, "timings": [asdict(timing) for timing in timings], "plan": plan.to_dict(),
            "files": [str(path) for path in files], "picture": str(picture),
            "sentence": {"text": SENTENCE, "label": label, "probability": share},
            "faces": str(faces),
        })  # fmt: skip
    else:
        print(f"accuracy {trained.accuracy:.2%} on {len(data.x_test)} test images")
        head = [f"{rows:,} rows", "on", "ms (p20-p80)", "rate", "onchip is", "max error"]
        cells = [
            [t.engine, t.device, f"{t.median_ms:.2f} ({t.p20_ms:.2f}-{t.p80_ms:.2f})", rate(rows / t.median_ms * 1e3),
             f"{t.median_ms / timings[0].median_ms:.2f}x as fast" if i else "", f"{t.error:.1e}"]
            for i, t in enumerate(timings)
        ]  # fmt: skip
        print(fitted_columns(head, cells, terminal_width(sys.stdout), right=(2, 3, 4, 5)))
        print(f'"{SENTENCE}" is {label} ({share:.2f}): onchip run sentiment --text "{SENTENCE}"')
    print_message(f"picture: {picture}\nsynthetic faces, by a generator that comes with onchip: {faces}")
