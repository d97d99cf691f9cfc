"""The errors that hetjax raises on purpose, and the sentence that each one carries."""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Iterable, Sequence
from numbers import Integral, Real
from typing import TypeGuard


class InputError(ValueError):
    r"""Something that a person gave is wrong: a configuration, a file, a plan, a model.

    The commands print it as one line and exit with code 2, before anything is allocated. What a
    terminal would not show, or would obey, is written as Python writes it in a string.

    Args:
        message: the sentence, which may quote what was given as it is.

    Example:
        >>> print(InputError("unknown name a\x1b[2Jb"))
        unknown name a\x1b[2Jb
    """

    def __init__(self, message: str):
        super().__init__(message if message.isprintable() else _printable(message))


def _printable(message: str) -> str:
    return "".join(
        each if each.isprintable() or each == "\n" else each.encode("unicode_escape").decode()
        for each in message
    )


class DoesNotFitError(InputError):
    """A model fits into the devices' memory in no way that was tried."""


class CheckpointError(InputError):
    """A checkpoint is not there, is not whole, or belongs to another model."""


class NonfiniteError(RuntimeError):
    """Training goes nowhere: too many losses or gradients in a row were not finite.

    No such step was applied, so parameters and optimizer state are those of the last finite step.
    """


class SaveError(RuntimeError):
    """A checkpoint could not be written, e.g. since the disk is full; training is not affected.

    Args:
        step: the number of steps done that it was to hold.
        reason: what went wrong.
    """

    def __init__(self, step: int, reason: str):
        super().__init__(f"checkpoint {step} was not saved: {reason}")
        self.step = step
        self.reason = reason

    def __reduce__(self) -> tuple[type[SaveError], tuple[int, str]]:
        return SaveError, (self.step, self.reason)


class WorkerLostError(RuntimeError):
    """A worker died or stopped answering; the message names it.

    Args:
        worker: the worker's name, e.g. ``"stage 1, host 0"``.
        reason: what was seen of it.
    """

    def __init__(self, worker: str, reason: str):
        super().__init__(f"{worker} is lost: {reason}")
        self.worker = worker
        self.reason = reason

    def __reduce__(self) -> tuple[type[WorkerLostError], tuple[str, str]]:
        return WorkerLostError, (self.worker, self.reason)


def reason_of(error: BaseException) -> str:
    """What went wrong, in one line, without Python's words for it where there are others.

    Args:
        error: what was raised.

    Returns:
        For an error of the operating system its text and the file, else the error's first line.

    Example:
        >>> reason_of(OSError(28, "No space left on device", "runs/first/plan.json"))
        'No space left on device (runs/first/plan.json)'
        >>> reason_of(KeyError("w"))
        "KeyError: 'w'"
    """
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror} ({error.filename})" if error.filename else error.strerror
    lines = str(error).strip().splitlines()
    text = lines[0] if lines else ""
    if isinstance(error, InputError) and text:
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def unknown_name(what: str, name: object, known: Iterable[str]) -> str:
    """A sentence for a name that is not known, with the nearest one that is.

    Args:
        what: what the name stands for, e.g. ``"device kind"``.
        name: what was given in the place of a name.
        known: the names that are allowed.

    Returns:
        One sentence: what was given, the nearest allowed name, and all that are allowed.

    Example:
        >>> unknown_name("device kind", "A10", ["A100-40", "T4"])
        "unknown device kind 'A10'; did you mean 'A100-40'? Allowed: A100-40, T4"
    """
    allowed = sorted(map(str, known))
    text = name if isinstance(name, str) else ""
    near = difflib.get_close_matches(text, allowed, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    return f"unknown {what} {shown(name)}{hint} Allowed: {', '.join(allowed) or 'none'}"


def is_whole(value: object) -> TypeGuard[int]:
    """Whether something that was given is a whole number; True is none.

    Args:
        value: what was given.

    Example:
        >>> is_whole(2), is_whole(2.0), is_whole(True)
        (True, False, False)
    """
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[float]:
    """Whether something that was given is a real number; True is none.

    Args:
        value: what was given.
    """
    return isinstance(value, Real) and not isinstance(value, bool)


def check_count(name: str, value: object) -> None:
    """Check that something that is counted is a whole number of 1 or more.

    Args:
        name: what the number is called.
        value: what was given.

    Raises:
        InputError: it is none; True is none either.

    Example:
        >>> check_count("keep_last", 2.0)
        Traceback (most recent call last):
        hetjax.errors.InputError: keep_last is 2.0; it must be a whole number, 1 or more
    """
    if not (is_whole(value) and value >= 1):
        raise InputError(f"{name} is {shown(value)}; it must be a whole number, 1 or more")


def check_flag(name: str, value: object) -> None:
    """Check that something is True or False.

    Args:
        name: what it is called.
        value: what was given.

    Raises:
        InputError: it is neither.

    Example:
        >>> check_flag("allow_recompute", "no")
        Traceback (most recent call last):
        hetjax.errors.InputError: allow_recompute is 'no'; it must be True or False
    """
    if not isinstance(value, bool):
        raise InputError(f"{name} is {shown(value)}; it must be True or False")


def check_numbers(name: str, values: object) -> None:
    """Check that something names devices or cores: a collection of whole numbers of 0 or more.

    Args:
        name: what they are called.
        values: what was given.

    Raises:
        InputError: it is none.

    Example:
        >>> check_numbers("lost", 2)
        Traceback (most recent call last):
        hetjax.errors.InputError: lost is 2; it must be a collection of whole numbers, 0 or more
    """
    if not (isinstance(values, Collection) and all(is_whole(v) and v >= 0 for v in values)):
        raise InputError(
            f"{name} is {shown(values)}; it must be a collection of whole numbers, 0 or more"
        )


def check_seconds(name: str, value: object) -> None:
    """Check that a time to wait is a finite number of more than 0.

    Args:
        name: what it is called.
        value: what was given.

    Raises:
        InputError: it is none.

    Example:
        >>> check_seconds("deadline", float("nan"))
        Traceback (most recent call last):
        hetjax.errors.InputError: deadline is nan; it must be seconds, more than 0 and finite
    """
    if not (is_number(value) and value > 0 and math.isfinite(value)):
        raise InputError(f"{name} is {shown(value)}; it must be seconds, more than 0 and finite")


def shown(value: object, length: int = 60) -> str:
    r"""A value as a sentence can hold it: on one line, and not long.

    Args:
        value: any value.
        length: the most characters.

    Returns:
        Its `repr`, cut off where it is longer.

    Example:
        >>> shown("a\nb"), shown(list(range(100)), length=12)
        ("'a\\nb'", '[0, 1, 2,...')
    """
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # Thousands of digits, or of brackets.
        text = f"a {type(value).__name__} too long to show"
    text = " ".join(line.strip() for line in text.splitlines())
    return text if len(text) <= length else f"{text[: length - 3]}..."


def together(names: Sequence[str], most: int = 8) -> str:
    """Names in a row, the first of many.

    Args:
        names: the names.
        most: how many are told.

    Example:
        >>> together(["a", "b", "c"]), together(["a", "b", "c"], most=2)
        ('a, b, c', 'a, b and 1 more')
    """
    left = len(names) - most
    return ", ".join(names[:most]) + (f" and {left} more" if left > 0 else "")
