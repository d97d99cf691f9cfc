"""How a job gets to the workers: pickled by Ray, and tried before a worker starts."""

from __future__ import annotations

import copyreg
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hetjax.errors import InputError
from hetjax.runtime.workers.job import Job

_FIELDS = ("loss_function", "parameters", "optimizer", "source", "batch")


def put_job(job: Job) -> Any:
    """Give a job to Ray.

    Args:
        job: the job.

    Returns:
        Ray's reference to it.

    Raises:
        InputError: a part of it cannot be pickled, or made again from that, and so cannot reach the
            workers.
    """
    import ray

    # JAX's arrays would land on the first device of every worker.
    if not callable(job.parameters):
        job = replace(job, parameters=jax.tree.map(_on_host, job.parameters))
    try:
        reference = ray.put(job)
    except Exception:
        for name in _FIELDS:
            _check_sent(name, job, ray.put)
        raise
    # What holds data, as a source may, would be in memory twice.
    for name in ("loss_function", "optimizer", "parameters"):
        if name != "parameters" or callable(job.parameters):
            _check_sent(name, job, as_sent)
    return reference


def as_sent(value: Any) -> Any:
    """What a worker has of something that it is sent.

    Args:
        value: what is sent.

    Returns:
        What is made again of its pickle.
    """
    from ray import cloudpickle

    sending: Any = cloudpickle
    return sending.loads(sending.dumps(value))


def _check_sent(name: str, job: Job, send: Callable[[Any], Any]) -> None:
    try:
        send(getattr(job, name))
    except Exception as error:
        raise InputError(
            f"{name} cannot be sent to the workers of the Ray runtime, which are processes of "
            f"their own: {error.__cause__ or error}; functions and classes of a module that "
            f"workers can import are sent by their names"
        ) from None


def _on_host(leaf: Any) -> Any:
    """An array of JAX as one of NumPy, where that has such."""
    is_plain = isinstance(leaf, jax.Array) and not jnp.issubdtype(leaf.dtype, jax.dtypes.extended)
    return np.asarray(leaf) if is_plain else leaf


def _reduced(function: jax.custom_vjp) -> tuple[Any, tuple[Any], Mapping[str, Any]]:
    """How to make a function with a derivative of its own again; pickle would leave out `fun`."""
    return jax.custom_vjp, (function.__wrapped__,), vars(function)


copyreg.pickle(jax.custom_vjp, _reduced)
