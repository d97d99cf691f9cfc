"""What the benchmarks share: the model's size, turns, medians, and processes that run in turn.

Systems are compared in rounds: in each, every system runs a few steps, one after another, so that
whatever else the machine does touches all of them alike. A figure is the median over the rounds,
and a ratio the median of the rounds' own ratios.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

SCRIPTS = Path(__file__).resolve().parent
WARM_UP_STEPS = 3
"""How many steps every system runs before it is timed; their losses are compared."""

KEPT_MEMORY = {
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1:glibc.malloc.mmap_max=0:glibc.malloc.arena_max=1"
    f":glibc.malloc.trim_threshold={2**40}"
}
"""What hetjax sets for its CPU workers on Ray, and what they are compared with may have too."""

Times = Mapping[str, Sequence[float]]
"""For each system the seconds of a step, one entry a round."""


@dataclass(frozen=True)
class Size:
    """The size of the benchmarked GPT and of its batch.

    Args:
        blocks: Transformer blocks.
        width: size of the residual stream.
        heads: attention heads.
        sequence: positions of an example.
        vocabulary: number of tokens.
        microbatches: microbatches a step.
        microbatch_size: examples in each.
    """

    blocks: int = 8
    width: int = 256
    heads: int = 4
    sequence: int = 128
    vocabulary: int = 1024
    microbatches: int = 8
    microbatch_size: int = 4

    @property
    def batch_size(self) -> int:
        """Examples in a step."""
        return self.microbatches * self.microbatch_size

    def tokens(self) -> np.ndarray:
        """A batch of random tokens, always the same: int32 [examples, sequence + 1]."""
        shape = (self.batch_size, self.sequence + 1)
        return np.random.default_rng(0).integers(0, self.vocabulary, shape, dtype=np.int32)


def argument_parser(description: str | None, *, rounds: int, steps: int, size: Size = Size()):
    """A parser of what all benchmarks take.

    Args:
        description: what the benchmark does.
        rounds: how many rounds it runs unless told.
        steps: how many steps of every system a round has.
        size: the sizes unless told.

    Returns:
        The parser; `size_of` reads the sizes from what it parses.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add_size(parser, size)
    parser.add_argument("--rounds", type=positive, default=rounds, metavar="N", help="rounds")
    parser.add_argument(
        "--steps", type=positive, default=steps, metavar="N", help="steps of a system in a round"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def add_size(parser: argparse.ArgumentParser, size: Size = Size()) -> None:
    """Let a parser take sizes.

    Args:
        parser: the parser; `size_of` reads the sizes from what it parses.
        size: the sizes unless told.
    """
    for name, default in asdict(size).items():
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, type=positive, default=default, metavar="N", help="of the GPT")


def positive(text: str) -> int:
    """A positive number of the command line."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return number


def size_of(arguments: argparse.Namespace) -> Size:
    """The sizes that were asked for."""
    return Size(**{field.name: getattr(arguments, field.name) for field in fields(Size)})


def size_flags(size: Size) -> list[str]:
    """The command line's flags that give a size."""
    flags = [("--" + name.replace("_", "-"), str(value)) for name, value in asdict(size).items()]
    return [part for flag in flags for part in flag]


def take_turns(
    systems: Mapping[str, Callable[[], float]], *, rounds: int, steps: int
) -> dict[str, list[float]]:
    """Time systems in turn.

    Args:
        systems: by name, what runs one step and returns its seconds.
        rounds: how many rounds.
        steps: how many steps of every system in each, of which the median counts. One step more
            comes first and does not count: it finds caches cold, and its memory reclaimed.

    Returns:
        For each system the seconds of a step, one entry a round.
    """
    times: dict[str, list[float]] = {name: [] for name in systems}
    for index in range(rounds):
        # Backwards every other time, so that none always follows the same neighbour.
        for name in list(systems)[:: -1 if index % 2 else 1]:
            systems[name]()
            times[name].append(median(systems[name]() for _ in range(steps)))
    return times


def median_ratio(times: Times, over: str, under: str) -> float:
    """The median over the rounds of one system's time over another's.

    Example:
        >>> median_ratio({"a": [2.0, 9.0, 4.0], "b": [1.0, 3.0, 2.0]}, "a", "b")
        2.0
    """
    return median(a / b for a, b in zip(times[over], times[under], strict=True))


def check_losses(losses: Mapping[str, Sequence[float]], tolerance: float = 1e-3) -> float:
    """Check that all systems compute the same thing.

    Args:
        losses: for each system the losses of its first steps.
        tolerance: the largest relative difference from the first system that is rounding.

    Returns:
        The largest relative difference.

    Raises:
        SystemExit: it is larger than the tolerance, so that timings mean nothing.
    """
    reference, *_ = losses.values()
    gaps = {
        name: max(abs(a - b) / abs(b) for a, b in zip(values, reference, strict=True))
        for name, values in losses.items()
    }
    for name, gap in gaps.items():
        if not gap <= tolerance:
            raise SystemExit(
                f"{name} computes other losses than {next(iter(losses))}: {losses[name]} "
                f"instead of {reference}"
            )
    return max(gaps.values())


class Child:
    """A process of its own that answers requests, one line of JSON each; see `serve`.

    It ends when its input does, and so whenever this process does.

    Args:
        script: the script to run, in this folder.
        flags: its flags.
        environment: variables to set for it.
        wrap: from its command line to the one to run, e.g. on a host of the lab.
    """

    def __init__(
        self,
        script: str,
        flags: Sequence[str],
        environment: Mapping[str, str] | None = None,
        wrap: Callable[[list[str]], list[str]] = list,
    ):
        self._process = subprocess.Popen(
            wrap([sys.executable, str(SCRIPTS / script), *flags]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **(environment or {})},
        )
        self._name = " ".join([script, *flags])

    def ask(self, request: Any) -> None:
        """Send a request, without waiting for its answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()

    def answer(self, deadline: float = 600.0) -> Any:
        """Wait for the answer to the oldest request.

        Args:
            deadline: seconds to wait at most.

        Returns:
            The answer.

        Raises:
            RuntimeError: the process died or does not answer.
        """
        output = self._process.stdout
        assert output is not None
        ready, _, _ = select.select([output], [], [], deadline)
        line = output.readline() if ready else b""
        if not line:
            self.close()
            raise RuntimeError(f"{self._name} gave no answer within {deadline:g} s, or died")
        return json.loads(line)

    def close(self) -> None:
        """End the process. Closing twice does no harm."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.close()
            self._process.wait(timeout=2)
        except (OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


class RequestServer(ABC):
    """What a process answers with, and what it has to end."""

    def answer(self, request: Mapping[str, Any]) -> Any:
        """Do what is asked, by the method that the request names."""
        arguments = {name: value for name, value in request.items() if name != "do"}
        return getattr(self, f"do_{request['do']}")(**arguments)

    @abstractmethod
    def close(self) -> None:
        """End what was begun."""


def serve_until_end(server: RequestServer) -> None:
    """Answer the requests that come on the standard input, and end what was begun for them.

    Args:
        server: what answers.
    """
    try:
        serve(server.answer)
    finally:
        server.close()


def serve(handle: Callable[[Any], Any]) -> None:
    """Answer the requests that come on the standard input, until it ends.

    Args:
        handle: from a request to its answer, both JSON values.
    """
    # Libraries may print; the answers get the standard output to themselves.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    with contextlib.suppress(KeyboardInterrupt):
        for line in sys.stdin:
            print(json.dumps(handle(json.loads(line))), file=answers, flush=True)
