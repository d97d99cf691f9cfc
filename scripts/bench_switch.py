"""How fast a training state comes to another plan: by switching, beside a checkpoint.

Two hosts of the lab train a GPT in two stages. Most of the layers are in the first stage, then in
the second, then in the first again. Each time the state moves twice, in turns: by a switch over
Ray, and by saving with Orbax and restoring into a trainer of the other plan. The same at several
rates of the link; it needs root. Workers end and start in both ways, which is shown apart. What
training waits for beside that is, in a switch, giving the state to Ray and taking it: it moves
while workers start (moving is giving, moving and taking, as if one came after the other). Of a
checkpoint it is saving and restoring.

python scripts/bench_switch.py --json
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from statistics import median
from typing import Any

from bench_lab import one_device_losses
from benchmarking import Size, add_size, check_losses, positive, size_of
from lab import Specification, read_specification
from lab_trainer import trainers

SIZE = Size(blocks=4, width=384, sequence=64, microbatches=2)
RATES = (None, 25e6)
"""Of the link, in bytes/s; None: no limit."""
WAYS = (
    ("switch", 0.75),
    ("save_and_restore", 0.25),
    ("switch", 0.75),
    ("switch", 0.25),
)
"""How the state moves, one after the other, and the share of the layers that the first stage has
then."""


def measure(
    lab: Specification, size: Size, rounds: int, rates: Sequence[float | None]
) -> dict[str, Any]:
    """Move the state there and back, in turns by both ways, and train in between.

    Args:
        lab: two hosts.
        size: sizes of model and batch.
        rounds: how often, at each rate.
        rates: of the link.

    Returns:
        A row for each rate, and how far the losses are from those of one device.
    """
    rows = []
    with (
        tempfile.TemporaryDirectory() as workdir,
        trainers(lab, size) as (hosts, ours),
    ):
        hosts.set_rate(None)
        ours("measure_cluster")
        ours("make", "gpt", workdir=workdir)
        losses = ours("steps", "gpt", count=2)
        for rate in rates:
            hosts.set_rate(rate)
            moved: dict[str, list[Any]] = {"switch": [], "save_and_restore": []}
            for _ in range(rounds):
                for way, share in WAYS:
                    moved[way].append(ours(way, "gpt", share=share))
                    losses += ours("steps", "gpt", count=1)
            rows.append(_row(rate, moved["switch"], moved["save_and_restore"]))
    expected = one_device_losses(size, len(losses))
    difference = check_losses({"one device": expected, "switched": losses}, tolerance=1e-5)
    return {"rounds": rounds, "largest_loss_difference": difference, "rows": rows}


def _row(
    rate: float | None,
    switches: Sequence[dict[str, float]],
    checkpoints: Sequence[dict[str, float]],
) -> dict[str, Any]:
    waiting = median(each["give"] + each["take"] for each in switches)
    moving = median(each["give"] + each["move"] + each["take"] for each in switches)
    storing = median(each["save"] + each["restore"] for each in checkpoints)
    size = median(each["bytes"] for each in switches)
    return {
        "link_bytes_per_second": rate,
        "bytes": size,
        "switch_seconds": waiting,
        "moving_seconds": moving,
        "give_seconds": median(each["give"] for each in switches),
        "take_seconds": median(each["take"] for each in switches),
        "with_workers_seconds": median(each["all"] for each in switches),
        "link_use": None if rate is None else size / rate / moving,
        "link_seconds_over_waiting": None if rate is None else size / rate / waiting,
        "checkpoint_seconds": storing,
        "checkpoint_with_workers_seconds": median(each["all"] for each in checkpoints),
        "checkpoint_over_switch": storing / waiting,
        "checkpoint_over_moving": storing / moving,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_size(parser, SIZE)
    parser.add_argument("--rounds", type=positive, default=3, help="at each rate (default: 3)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    found = measure(read_specification("two_hosts"), size_of(options), options.rounds, RATES)
    if options.json:
        print(json.dumps(found, indent=2))
        return
    for row in found["rows"]:
        rate = row["link_bytes_per_second"]
        limit = "no limit" if rate is None else f"{rate / 1e6:.0f} MB/s"
        use = "" if row["link_use"] is None else f", {row['link_use']:.0%} of the link"
        print(
            f"{limit}: {row['bytes'] / 1e6:.1f} MB moved in {row['moving_seconds']:.2f} s{use}, "
            f"waited for {row['switch_seconds']:.2f} s; "
            f"by a checkpoint {row['checkpoint_seconds']:.2f} s "
            f"({row['checkpoint_over_switch']:.1f} times)"
        )


if __name__ == "__main__":
    main()
