"""The options of ``hetjax.align``, checked; nothing here imports JAX."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hetjax.alignment.kinds import AlignedKind, parse_kinds
from hetjax.errors import InputError, shown, unknown_name
from hetjax.mesh.units import BYTES, parse_quantity
from hetjax.reading import check_path

_TOLERANCES = 1e-12, 1e6
"""The least is far below any rounding, the most far above any error."""

_NUMBERS = re.compile(r"(\d{1,6})(?:-(\d{1,6}))?")


@dataclass(frozen=True)
class InjectedError:
    """An error that is asked for.

    Args:
        kind: the kind's name.
        operator: the operator's number.
        size: relative; may be infinite or NaN.
        step: the only training step, from 1, that has it; None for all.
    """

    kind: str
    operator: int
    size: float
    step: int | None


@dataclass(frozen=True)
class AlignmentOptions:
    """What is to be aligned.

    Args:
        kinds: the kinds; unless there is a capture to replay, the first is the reference.
        tolerance: the largest error of an operator that is rounding.
        steps: training steps whose losses are compared.
        operators: numbers of the operators that are looked at; None for all.
        capture: the folder to write a capture to.
        limit: the most bytes of it.
        replay: the folder of a capture to compare with.
        inject: an error to put in.
    """

    kinds: tuple[AlignedKind, ...]
    tolerance: float
    steps: int
    operators: frozenset[int] | None
    capture: Path | None
    limit: float
    replay: Path | None
    inject: InjectedError | None


def alignment_options(arguments: argparse.Namespace) -> AlignmentOptions:
    """The options of a command line.

    Args:
        arguments: what the parser made of it.

    Returns:
        The options.

    Raises:
        InputError: one is not allowed, or does not go with another.
    """
    if arguments.capture and arguments.replay:
        raise InputError("--capture and --replay are both given; give one: they are two runs")
    kinds = parse_kinds(arguments.kinds, 1 if arguments.capture or arguments.replay else 2)
    least, most = _TOLERANCES
    if not least <= arguments.tolerance <= most:
        raise InputError(
            f"--tolerance is {arguments.tolerance}; it must be from {least:g} to {most:g}"
        )
    if arguments.steps < 0:
        raise InputError(f"--steps is {arguments.steps}; it must be 0 or more")
    if arguments.rows < 1:
        raise InputError(f"--rows is {arguments.rows}; it must be 1 or more")
    try:
        limit = parse_quantity(arguments.limit, BYTES)
    except InputError as error:
        raise InputError(f"--limit: {error}") from None
    return AlignmentOptions(
        kinds,
        arguments.tolerance,
        arguments.steps,
        _operators(arguments.operators),
        _new_folder(arguments.capture),
        limit,
        _capture_folder(arguments.replay),
        _inject(arguments, kinds),
    )


def _operators(texts: Sequence[str]) -> frozenset[int] | None:
    found: set[int] = set()
    for text in texts:
        match = _NUMBERS.fullmatch(text)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if last < first:
            raise InputError(
                f"--operators: {shown(text)} is not allowed: give 17, or 10-20, numbers "
                "below 1,000,000"
            )
        found.update(range(first, last + 1))
    return frozenset(found) if texts else None


def _new_folder(name: str | None) -> Path | None:
    if name is None:
        return None
    subject = f"--capture {shown(name, 200)}"
    check_path(name, subject)
    folder = Path(name)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"{subject}: there is something already; name a new or an empty folder")
    there = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise InputError(f"{subject}: {there} cannot be written to")
    return folder


def _capture_folder(name: str | None) -> Path | None:
    if name is None:
        return None
    subject = f"--replay {shown(name, 200)}"
    check_path(name, subject)
    if not Path(name).is_dir():
        raise InputError(f"{subject}: there is no such folder")
    return Path(name)


def _inject(arguments: argparse.Namespace, kinds: Sequence[AlignedKind]) -> InjectedError | None:
    step = arguments.inject_step
    if arguments.inject is None:
        if step is not None:
            raise InputError("--inject-step is given without --inject")
        return None
    kind, operator, size = arguments.inject
    others = [each.name for each in (kinds if arguments.replay else kinds[1:])]
    if kind not in others:
        raise InputError(unknown_name("kind of --inject (the reference is none)", kind, others))
    if not re.fullmatch(r"\d{1,7}", operator):
        raise InputError(f"--inject: operator {shown(operator)} is not allowed: give its number")
    try:
        number = float(size)
    except ValueError:
        number = 0.0
    if not number:
        raise InputError(
            f"--inject: size {shown(size)} is not allowed: give a number such as 1e-2, inf or nan"
        )
    if step is not None and not 1 <= step <= arguments.steps:
        raise InputError(f"--inject-step is {step}; it must be from 1 to --steps {arguments.steps}")
    return InjectedError(kind, int(operator), number, step)
