"""Writers of a run's figures: what each does, and those that another package is needed for.

W&B and MLflow may be slow, far away or full. Each has a thread of its own, so that none of that
reaches training: what they could not take is told, and the run goes on.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from hetjax.errors import InputError, reason_of, unknown_name

WRITERS = ("mlflow", "wandb")
"""The names of the optional writers; each is also that of its package and of the extra for it."""

PROJECT = "hetjax"
"""W&B's project and MLflow's experiment, where the environment names none."""

_MOST_WAITING = 10_000
"""How many steps may wait for a writer before those that come are left out."""

_CLOSING_SECONDS = 60.0
"""How long a run waits at its end for a writer to take what it was given."""


class FigureWriter(Protocol):
    """Takes the figures of every step to one place."""

    @property
    def failure(self) -> str | None:
        """Why figures are missing there; None where none are."""
        ...

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """Take the figures of a step; what cannot be written is told by `failure`."""
        ...

    def close(self) -> None:
        """Write what waits, and end; closing twice is harmless."""
        ...


@dataclass(frozen=True)
class Destination:
    """What optional writers are told of a run.

    Args:
        workdir: the work folder; its name is the run's.
        first_step: the first step that will be written; more than 1 for a run that resumes.
        settings: the run's settings by name.
    """

    workdir: Path
    first_step: int = 0
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def group(self) -> str:
        """The name that a run and those that resume it share."""
        return self.workdir.resolve().name

    @property
    def name(self) -> str:
        """The run's own name."""
        return f"{self.group} from step {self.first_step}" if self.first_step > 1 else self.group


def check_writers(names: Sequence[str], what: str = "writers") -> None:
    """Check that optional writers can be had, without starting one.

    Args:
        names: of `WRITERS`.
        what: what a message calls them, e.g. ``"train.writers"``.

    Raises:
        InputError: a name is not known or there twice, its package is not installed, or W&B has no
            key that could be one and is not offline.

    Example:
        >>> check_writers(["wandb", "csv"])
        Traceback (most recent call last):
        hetjax.errors.InputError: unknown writers 'csv'. Allowed: mlflow, wandb
    """
    check_writer_names(names, what)
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise InputError(
                f"{what} has {name!r}, and the package {name} is not installed: "
                f"pip install 'hetjax[{name}]'"
            )
    if "wandb" in names and (problem := _key_problem()):
        raise InputError(f"{what} has 'wandb': {problem}")


def check_writer_names(names: Sequence[str], what: str = "writers") -> None:
    """Check names alone, wherever the packages may be installed.

    Args:
        names: of `WRITERS`.
        what: what a message calls them.

    Raises:
        InputError: a name is not known, or there twice.
    """
    for place, name in enumerate(names):
        if name not in WRITERS:
            raise InputError(unknown_name(what, name, WRITERS))
        if name in names[:place]:
            raise InputError(f"{what} names {name!r} twice")


def open_writers(names: Sequence[str], destination: Destination) -> dict[str, FigureWriter]:
    """Begin to write to optional writers.

    Args:
        names: of `WRITERS`.
        destination: the run.

    Returns:
        The writers by name. One that cannot be opened tells so by its `failure`.

    Raises:
        InputError: as `check_writers`.
    """
    check_writers(names)
    kinds: Mapping[str, Callable[[Destination], Tracker]] = {"mlflow": _Mlflow, "wandb": _Wandb}
    return {name: BackgroundWriter(name, kinds[name], destination) for name in names}


class Tracker(Protocol):
    """A package's own run; it may raise whatever it likes, and take its time."""

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """Take the figures of a step."""
        ...

    def finish(self) -> None:
        """End the run."""
        ...


class BackgroundWriter:
    """Hands figures to a tracker on a thread, which opens it, writes to it and ends it.

    Args:
        name: its name.
        opening: makes the tracker.
        destination: the run.
    """

    def __init__(
        self, name: str, opening: Callable[[Destination], Tracker], destination: Destination
    ):
        self._failure: str | None = None
        self._opening, self._destination = opening, destination
        self._waiting: queue.Queue[tuple[int, Mapping[str, float]] | None] = queue.Queue()
        self._closed = False
        # A thread that hangs in another package is not to keep the process.
        self._thread = threading.Thread(target=self._work, name=f"hetjax {name}", daemon=True)
        self._thread.start()

    @property
    def failure(self) -> str | None:
        """Why figures are missing; None where none are."""
        return self._failure

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """Take the figures of a step; it returns at once."""
        if self._waiting.qsize() >= _MOST_WAITING:
            self._fail(f"it is too slow: {_MOST_WAITING} steps wait, the figures of {step} do not")
        elif self._thread.is_alive():
            finite = {name: value for name, value in figures.items() if math.isfinite(value)}
            self._waiting.put((step, finite))

    def close(self) -> None:
        """Wait until all is written, for a minute at most."""
        if self._closed:
            return
        self._closed = True
        self._waiting.put(None)
        self._thread.join(_CLOSING_SECONDS)
        if self._thread.is_alive():
            self._fail(f"it has not ended {_CLOSING_SECONDS:.0f} s after the run")

    def _fail(self, reason: str) -> None:
        self._failure = self._failure or reason

    def _work(self) -> None:
        try:
            tracker = self._opening(self._destination)
        except BaseException as error:  # Also SystemExit: here it would end the thread unseen.
            self._fail(reason_of(error))
            return
        while (given := self._waiting.get()) is not None:
            step, figures = given
            try:
                tracker.write(step, figures)
            except BaseException as error:
                self._fail(f"step {step}: {reason_of(error)}")
        try:
            tracker.finish()
        except BaseException as error:
            self._fail(reason_of(error))


class _Wandb:
    """A run of W&B, beside any that this process has already."""

    def __init__(self, destination: Destination):
        wandb = importlib.import_module("wandb")
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            group=destination.group,
            name=destination.name,
            dir=str(destination.workdir),
            config=dict(destination.settings),
            reinit="create_new",
            # Else it would take hold of this process's stdout and stderr. A server that does not
            # answer is told before the run ends waiting for it.
            settings=wandb.Settings(console="off", init_timeout=_CLOSING_SECONDS / 2),
        )

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        self._run.log(dict(figures), step=step)

    def finish(self) -> None:
        self._run.finish()


class _Mlflow:
    """A run of MLflow: on the server that MLFLOW_TRACKING_URI names, else in the work folder."""

    def __init__(self, destination: Destination):
        mlflow = importlib.import_module("mlflow")
        self._entities = importlib.import_module("mlflow.entities")
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        folder = destination.workdir.resolve()
        if not uri and any(sign in str(folder) for sign in "?#"):
            # They end the path in the address of a database, which would be made elsewhere.
            raise InputError(
                f"MLflow has no address for a database in {folder}, whose name has '?' or '#'; set "
                f"MLFLOW_TRACKING_URI, or name another folder"
            )
        self._client = mlflow.MlflowClient(uri or f"sqlite:///{folder / 'mlflow.db'}")
        experiment = self._experiment(None if uri else (folder / "mlartifacts").as_uri())
        run = self._client.create_run(
            experiment, run_name=destination.name, tags={"hetjax.run": destination.group}
        )
        self._id = run.info.run_id
        parameters = (self._entities.Param(k, str(v)) for k, v in destination.settings.items())
        # A call takes a hundred at most.
        while some := list(itertools.islice(parameters, 100)):
            self._client.log_batch(self._id, params=some)

    def _experiment(self, artifacts: str | None) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        found = self._client.get_experiment_by_name(name)
        if found is not None:
            return found.experiment_id
        return self._client.create_experiment(name, artifact_location=artifacts)

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        metrics = [self._entities.Metric(k, v, now, step) for k, v in figures.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def finish(self) -> None:
        self._client.set_terminated(self._id)


def _key_problem() -> str | None:
    """Why W&B cannot know who it is, without asking at the terminal or over the network."""
    wandb = importlib.import_module("wandb")
    try:
        if wandb.setup().settings.mode in ("offline", "dryrun", "disabled"):
            return None
        has_key = wandb.login(prompt=False, verify=False)
    except Exception as error:  # A key that can be none, in W&B's own words.
        return reason_of(error)
    return None if has_key else "it has no key: run `wandb login`, or set WANDB_MODE=offline"
