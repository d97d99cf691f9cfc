"""What is raised in a worker by the user's code, as an error that reaches the driver."""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar


class Named(Protocol):
    """What has a name by which messages call it."""

    name: str


Params = ParamSpec("Params")
Worker = TypeVar("Worker", bound=Named)
Result = TypeVar("Result")


def telling(
    method: Callable[Concatenate[Worker, Params], Result],
) -> Callable[Concatenate[Worker, Params], Result]:
    """A method of a worker whose errors the driver can read.

    Ray sends what it can pickle, and takes a worker for dead that is told to exit. In the place of
    what would not arrive, a `RuntimeError` says which worker has raised what, and where.

    Args:
        method: runs code of the user's.

    Returns:
        The method.
    """

    @functools.wraps(method)
    def told(worker: Worker, *args: Params.args, **options: Params.kwargs) -> Result:
        try:
            return method(worker, *args, **options)
        except BaseException as error:
            if _arrives(error):
                raise
            raise RuntimeError(f"{worker.name} has raised {_described(error)}") from error

    return told


def _arrives(error: BaseException) -> bool:
    """Whether an error can be sent, and is the same then."""
    if not isinstance(error, Exception):
        return False
    from ray import cloudpickle

    sending: Any = cloudpickle
    try:
        sent = sending.loads(sending.dumps(error))
    except Exception:  # Whatever the user's class does.
        return False
    return type(sent) is type(error) and str(sent) == str(error)


def _described(error: BaseException) -> str:
    """An error in one line: its type, its text, and where it was raised."""
    *_, frame = traceback.extract_tb(error.__traceback__)
    text = f": {error}" if str(error) else ""
    return f"{type(error).__name__}{text} ({frame.filename}:{frame.lineno})"
