"""The actors of a Ray executor: started, called and watched together, and lost together."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hetjax.errors import InputError, WorkerLostError, together
from hetjax.runtime.moves.peers import Peer
from hetjax.runtime.ray.ray_cluster import RaySession, current_session
from hetjax.runtime.ray.ray_worker import PIECES, HostWorker
from hetjax.runtime.workers.waiting import Awaited, hint_of_nodes

PING_SECONDS = 0.5
"""How often workers are asked for a sign of life while a call runs."""

SILENCE_SECONDS = 8.0
"""A worker whose process does not answer for so long is lost."""

ANSWER_SECONDS = 3.0
"""How long the workers may take to answer when one of them has failed."""

START_SECONDS = 120.0
"""How long the workers' processes may take to start."""

WATCH, SAVE = "watch", "save"
"""A worker runs one call after the other. Those of these groups do not wait for the others."""

_ACTOR: dict[str, Any] = {"concurrency_groups": {WATCH: 1, SAVE: 1, PIECES: 1}}


class RayWorkers:
    """The workers of one executor, an actor each.

    A call that fails ends all of them; from then on every call raises the same error. Calls may
    come from several threads.

    Args:
        names: what they are called in messages.

    Attributes:
        processes: the process of each worker that has started.
        ended: why nothing can be called any more; None while the workers run.
    """

    def __init__(self, names: Mapping[Peer, str]) -> None:
        self._names = names
        self.processes: dict[Peer, int] = {}
        self.ended: Exception | None = None
        self._session: RaySession | None = None
        self._actors: dict[Peer, Any] = {}
        self._pings: dict[Peer, tuple[Any, float]] = {}
        self._lock = threading.RLock()

    @property
    def peers(self) -> list[Peer]:
        """Who they are."""
        return list(self._actors)

    def start(self, options: Mapping[Peer, Mapping[str, Any]]) -> None:
        """Start the workers' processes; from then on silence means loss.

        Args:
            options: Ray's options for each of them.

        Raises:
            WorkerLostError: one has not started in time.
        """
        import ray

        self._session = current_session()
        actor_class = ray.remote(**_ACTOR)(HostWorker)
        for peer, wanted in options.items():
            self._actors[peer] = actor_class.options(**wanted).remote(peer, self._names[peer])
        pings = {peer: self._ping(peer) for peer in self._actors}
        waiting, end = list(pings.values()), time.monotonic() + START_SECONDS
        awaited = Awaited(START_SECONDS, hint=hint_of_nodes())
        while waiting and time.monotonic() < end:
            ready, waiting = ray.wait(waiting, timeout=PING_SECONDS)
            started = [peer for peer, reference in pings.items() if reference in ready]
            signs = self.wait({peer: pings[peer] for peer in started})
            self.processes.update({peer: sign.process for peer, sign in signs.items()})
            if waiting and not awaited.silence:
                late = [self._names[peer] for peer, each in pings.items() if each in waiting]
                nodes = [each["NodeManagerAddress"] for each in ray.nodes() if each["Alive"]]
                awaited.tell(f"{together(late)} to start, on one of {together(nodes)}")
        for peer, reference in pings.items():
            if reference in waiting:
                raise WorkerLostError(
                    self._names[peer],
                    f"its process did not start within {START_SECONDS:g} s; other jobs may hold "
                    f"its devices",
                )

    def check_running(self) -> None:
        """Check that the workers run.

        Raises:
            Exception: why they do not.
        """
        with self._lock:
            if self.ended is None and not self._is_connected:
                self.end(self._disconnected())
            if self.ended is not None:
                raise self.ended

    @property
    def _is_connected(self) -> bool:
        return current_session() == self._session

    def _disconnected(self) -> WorkerLostError:
        reason = "the connection to Ray was closed, as by ray.shutdown(); make another trainer"
        return WorkerLostError("every worker", reason)

    def actor(self, peer: Peer) -> Any:
        """One worker's actor, for a call that is its own."""
        with self._lock:
            self.check_running()
            return self._actors[peer]

    def call(
        self, call: Callable[[Any], Any], peers: Sequence[Peer] | None = None
    ) -> dict[Peer, Any]:
        """Call workers, all at the same time.

        Args:
            call: makes the call of an actor.
            peers: which workers; None for all.

        Returns:
            Their answers.

        Raises:
            WorkerLostError: a worker died or does not answer, or the connection to Ray was closed.
            Exception: what a call raised.
        """
        return self.call_each(lambda _, actor: call(actor), peers)

    def call_each(
        self, call: Callable[[Peer, Any], Any], peers: Sequence[Peer] | None = None
    ) -> dict[Peer, Any]:
        """As `call`, where each worker is asked something of its own.

        Args:
            call: makes the call of a worker's actor.
            peers: which workers; None for all.
        """
        with self._lock:
            self.check_running()
            calls = {
                peer: call(peer, self._actors[peer])
                for peer in (self.peers if peers is None else peers)
            }
        return self.wait(calls)

    def wait(
        self, calls: Mapping[Peer, Any], what: str = "", seconds: float = 0.0
    ) -> dict[Peer, Any]:
        """Wait for calls, watching that every worker lives.

        Args:
            calls: references to the answers of calls that were made.
            what: what is awaited, with addresses, to be told where it takes long; empty where
                nothing is told.
            seconds: how long that may take.

        Returns:
            The answers.

        Raises:
            WorkerLostError: a worker died or does not answer.
            Exception: what a call raised.
        """
        import ray
        from ray.exceptions import RayError

        peers = {reference: peer for peer, reference in calls.items()}
        results: dict[Peer, Any] = {}
        pending, awaited = list(peers), Awaited(seconds, hint=hint_of_nodes() if what else "")
        try:
            while pending:
                if not self._is_connected:
                    raise self._disconnected()
                ready, pending = ray.wait(pending, timeout=PING_SECONDS)
                for reference in ready:
                    results[peers[reference]] = ray.get(reference)
                if not ready:
                    self._check_alive()
                    if what:
                        awaited.tell(what)
        except (RayError, WorkerLostError) as error:
            with self._lock:
                raise self.end(self.ended or self._blame(error)) from None
        return {peer: results[peer] for peer in calls}

    def end(self, reason: Exception) -> Exception:
        """End all workers; the first reason to do so is kept and returned."""
        import ray

        with self._lock:
            self.ended = self.ended or reason
            actors, self._actors = self._actors, {}
        if self._is_connected:
            for actor in actors.values():
                ray.kill(actor)
        return self.ended

    def _ping(self, peer: Peer) -> Any:
        return self._actors[peer].ping.options(concurrency_group=WATCH).remote()

    def _check_alive(self) -> None:
        """Ask every worker for a sign of life, and look at the answers to the last question."""
        import ray

        with self._lock:
            now = time.monotonic()
            for peer in self._actors:
                reference, asked = self._pings.get(peer, (None, now))
                if reference is not None and not ray.wait([reference], timeout=0)[0]:
                    if now - asked > SILENCE_SECONDS:
                        reason = f"it has not answered for {SILENCE_SECONDS:g} s"
                        raise WorkerLostError(self._names[peer], reason)
                    continue
                if reference is not None:
                    sign: Any = ray.get(reference)
                    for line in sign.said:
                        logging.getLogger("hetjax").warning(f"{self._names[peer]}: {line}")
                self._pings[peer] = (self._ping(peer), now)

    def _blame(self, error: Exception) -> Exception:
        """What to raise for an error: the loss of a worker before what others saw of it.

        Of several dead ones the first is named: in a `jax.distributed` world the death of host 0
        is soon that of the others, and no other host's.
        """
        if not self._is_connected:
            return self._disconnected()
        cause = getattr(error, "cause", None)
        if isinstance(error, WorkerLostError) and cause is None:
            return error
        return self._lost(cause) or _raised_by(error, cause)

    def _lost(self, cause: Any) -> WorkerLostError | None:
        """The loss of a worker whose process is dead, or who is silent where others miss one."""
        import ray
        from ray.exceptions import RayError

        pings = {peer: self._ping(peer) for peer in self._actors}
        answered, _ = ray.wait(list(pings.values()), num_returns=len(pings), timeout=ANSWER_SECONDS)
        for peer in [peer for peer, reference in pings.items() if reference in answered]:
            try:
                ray.get(pings[peer])
            except RayError as death:
                return WorkerLostError(self._names[peer], _death_reason(death))
        silent = [peer for peer, reference in pings.items() if reference not in answered]
        if silent and isinstance(cause, WorkerLostError):
            return WorkerLostError(self._names[silent[0]], "it does not answer")
        return None


def _raised_by(error: Exception, cause: Any) -> Exception:
    """What a worker that lives has raised.

    Args:
        error: Ray's error.
        cause: what the worker raised, where Ray tells.
    """
    from ray.exceptions import RaySystemError

    if isinstance(cause, RaySystemError) and isinstance(cause.client_exc, ImportError):
        return InputError(
            f"the workers of the Ray runtime cannot import what the job needs: "
            f"{cause.client_exc}; install it where they run, or give Ray the folder "
            f"(runtime_env's working_dir or py_modules)"
        )
    if not isinstance(cause, Exception):
        return error
    if not isinstance(cause, InputError | WorkerLostError):
        cause.add_note(f"It was raised in a worker:\n{error}")
    return cause


def _death_reason(death: Exception) -> str:
    """What to say of a worker whose calls fail with Ray's own error."""
    if "Worker exit" in str(death):
        return "its process has died: it was killed, has crashed or ran out of memory"
    return f"its process has died: {str(death).strip().splitlines()[-1].strip()}"
