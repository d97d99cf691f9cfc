"""What a pull from a near host takes beside one from a far host that is still coming.

    python scripts/bench_pulls.py

Three hosts of the lab, `near_and_far`: one pulls 4 MB over the slow link, and right afterwards
0.4 MB over the fast one; with one transfer server for all partners, and with one for each, as
hetjax has it. The lab needs root.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
from collections.abc import Iterator
from statistics import median
from typing import Any

from benchmarking import Child, positive
from lab import Lab, read_specification

FAR_BYTES, NEAR_BYTES = 4_000_000, 400_000


def pulls(lab: Lab, *, apart: bool, rounds: int) -> dict[str, Any]:
    """Pull alone and beside the other one, in turn; the medians of the seconds.

    Args:
        lab: the lab; its last host is the far one.
        apart: whether each partner has a transfer server of its own.
        rounds: how often.
    """
    with contextlib.ExitStack() as ends:
        first, near, far = (end(lab, place, apart, ends) for place in range(3))
        numbers = list(range(2 * rounds + 2))
        for name, child, size in (("near", near, NEAR_BYTES), ("far", far, FAR_BYTES)):
            address = asked(child, do="offer", to="first", num_bytes=size, numbers=numbers)
            asked(first, do="connect", to=name, address=address)
        count = itertools.count()
        alone, beside = [], []
        for turn in range(rounds + 1):
            where = {"do": "pull", "source": "near", "num_bytes": NEAR_BYTES}
            alone.append(asked(first, **where, number=next(count)))
            coming = ["far", turn, FAR_BYTES]
            beside.append(asked(first, **where, number=next(count), beside=coming))
    # The first ones open connections.
    found = {"alone": median(alone[1:]), "beside": median(beside[1:])}
    name = "a server for each partner" if apart else "one server"
    return {"servers": name, **found, "beside_over_alone": found["beside"] / found["alone"]}


def end(lab: Lab, place: int, apart: bool, ends: contextlib.ExitStack) -> Child:
    """The process on one of the lab's hosts."""
    host = lab.specification.hosts[place].name
    flags = [f"10.77.0.{place + 1}", *(["--apart"] if apart else [])]
    child = Child(
        "pull_ends.py", flags, lab.environment(), lambda command: lab.command(host, command)
    )
    return ends.enter_context(contextlib.closing(child))


def asked(child: Child, **request: Any) -> Any:
    """What a process answers."""
    child.ask(request)
    return child.answer(60.0)


def rows(rounds: int) -> Iterator[dict[str, Any]]:
    """Both ways."""
    with Lab.up(read_specification("near_and_far")) as lab:
        for apart in (False, True):
            yield pulls(lab, apart=apart, rounds=rounds)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=positive, default=7, metavar="N", help="rounds")
    parser.add_argument("--json", action="store_true", help="a row a line, as JSON")
    options = parser.parse_args()
    for row in rows(options.rounds):
        if options.json:
            print(json.dumps(row), flush=True)
        else:
            print(
                f"{row['servers']}: alone {1e3 * row['alone']:.1f} ms, beside a pull from far "
                f"{1e3 * row['beside']:.1f} ms, {row['beside_over_alone']:.1f} times as long"
            )


if __name__ == "__main__":
    main()
