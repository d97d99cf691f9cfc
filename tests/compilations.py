"""Counting what JAX traces and compiles."""

from collections.abc import Iterator
from contextlib import contextmanager

import jax


class Compilations:
    """Counts what JAX traces and compiles."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def __call__(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event.startswith("/jax/core/compile"):
            self.seen.append(event)


@contextmanager
def counted_compilations() -> Iterator[Compilations]:
    counter = Compilations()
    jax.monitoring.register_event_duration_secs_listener(counter)
    try:
        yield counter
    finally:
        jax.monitoring.unregister_event_duration_listener(counter)
