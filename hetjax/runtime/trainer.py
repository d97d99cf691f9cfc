"""The trainer: a plan, a loss and an optimizer, and steps."""

from __future__ import annotations

import functools
import json
import math
import os
import threading
import time
from collections.abc import Callable, Set
from dataclasses import replace
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import jax
import numpy as np
import optax
from jaxtyping import PyTree

from hetjax.collecting import seldom_collected
from hetjax.errors import InputError, SaveError, check_count, check_flag, shown
from hetjax.pipeline.program.loss import abstract, check_examples, path_names
from hetjax.pipeline.schedules.schedule import Schedule
from hetjax.pipeline.timeline.timeline import Timeline
from hetjax.pipeline.timeline.times import StepTimes
from hetjax.planner.plan.plan import Plan, as_plan, validate
from hetjax.reading import check_path
from hetjax.runtime.checkpoints.manifest import DataPosition
from hetjax.runtime.checkpoints.restoring import restore
from hetjax.runtime.checkpoints.saving import CheckpointOptions, RunCheckpoints
from hetjax.runtime.compilation.state import whole_parameters
from hetjax.runtime.executor import Executor
from hetjax.runtime.instructions.placement import Placement
from hetjax.runtime.local.left_plans import CompiledPlan, LeftPlans
from hetjax.runtime.local.local_executor import LocalExecutor
from hetjax.runtime.local.local_options import LocalOptions
from hetjax.runtime.local.played import PlayedExecutor
from hetjax.runtime.measuring import measuring
from hetjax.runtime.moves.carrier_curves import CarrierCurves
from hetjax.runtime.moves.state_switch import all_lost
from hetjax.runtime.ray.ray_executor import RayExecutor, RayOptions
from hetjax.runtime.step_metrics import StepMetrics, aux_means, step_metrics
from hetjax.runtime.workers.feed import BatchSource
from hetjax.runtime.workers.job import Job, build
from hetjax.runtime.workers.playing import Player
from hetjax.runtime.workers.step_report import LinkUse, StepReport, link_events, link_uses, summed
from hetjax.sharding.resolution.switch_transfers import SwitchPlan

_Params = ParamSpec("_Params")
_Result = TypeVar("_Result")

_CLOSED = "the trainer is closed; make another one to train on"


def _one_at_a_time(
    method: Callable[Concatenate[Trainer, _Params], _Result],
) -> Callable[Concatenate[Trainer, _Params], _Result]:
    """A method that waits until the trainer's other threads have left theirs.

    Where one of them closes the trainer meanwhile, that is what it raises.
    """

    @functools.wraps(method)
    def alone(trainer: Trainer, *args: _Params.args, **options: _Params.kwargs) -> _Result:
        with trainer._lock:
            try:
                return method(trainer, *args, **options)
            except (InputError, SaveError):
                raise
            except Exception as error:
                if trainer._closed:
                    raise InputError(_CLOSED) from error
                raise

    return alone


class Trainer:
    """Trains by a plan, in this process or on Ray.

    What is trained comes first; then what is kept, and where it runs. Calls may come from several
    threads: one waits for the other, but for `close`, which ends what runs.

    Args:
        plan: the plan, or the path of its file.
        loss_function: ``loss_function(parameters, batch)``, the plain JAX program that the plan was
            made for. Every `hetjax.reshard` in it is obeyed by its stage, or refused.
        parameters: pytree of arrays, which are copied when training starts, or a function without
            arguments that makes it, in which case every stage makes only its own.
        optimizer: any Optax transformation; one that asks for the ``value`` of the loss gets it.
        batch: pytree of arrays or shapes: the batch of one whole step, ``[examples, ...]``.
        has_aux: whether the loss function returns a pair of the loss and a pytree of scalars, as in
            `jax.value_and_grad`; `StepMetrics.aux` has their means.
        source: where batches come from; None where every step is given its own.
        workdir: folder for checkpoints; None for none. The trainer has it alone until it is closed.
        checkpoints: which of them to keep; None for `CheckpointOptions()`.
        runtime: where the stages run: in this process by `LocalOptions`, on Ray by `RayOptions`;
            None for `LocalOptions()`.

    Attributes:
        steps_done: how many steps were done.
        examples_done: how many examples they had: the next step's first has this number.

    Raises:
        InputError: the plan, model, batch, optimizer and devices do not fit each other, or another
            run writes to the workdir.

    Example:
        >>> import jax, jax.numpy as jnp, optax, hetjax
        >>> loss = lambda w, batch: jnp.mean((batch["x"] @ w - batch["y"]) ** 2)
        >>> batch = {"x": jnp.ones((8, 4)), "y": jnp.ones((8, 2))}
        >>> cluster = hetjax.Cluster.local(jax.devices()[:1])
        >>> plan = hetjax.plan(loss, jnp.zeros((4, 2)), batch, cluster=cluster,
        ...                    optimizer=optax.sgd(0.1), num_microbatches=2)
        >>> with hetjax.Trainer(plan, loss, jnp.zeros((4, 2)), optax.sgd(0.1), batch) as trainer:
        ...     metrics = [trainer.train_step(batch) for _ in range(3)]
        >>> round(metrics[0].loss, 3), metrics[2].loss < metrics[0].loss
        (1.0, True)
    """

    @seldom_collected()
    def __init__(
        self,
        plan: Plan | str | os.PathLike[str],
        loss_function: Callable[..., Any],
        parameters: PyTree | Callable[[], PyTree],
        optimizer: optax.GradientTransformation,
        batch: PyTree,
        *,
        has_aux: bool = False,
        source: BatchSource | None = None,
        workdir: str | Path | None = None,
        checkpoints: CheckpointOptions | None = None,
        runtime: LocalOptions | RayOptions | None = None,
    ):
        plan = as_plan(plan)
        if workdir is not None:
            _check_workdir(workdir)
        runtime = LocalOptions() if runtime is None else runtime
        if not isinstance(runtime, LocalOptions | RayOptions):
            raise InputError(
                f"runtime is {runtime!r}; give hetjax.LocalOptions() to run in this process, or "
                f"hetjax.RayOptions()"
            )
        for name, given in (("parameters", parameters), ("batch", batch)):
            if not callable(given) and not jax.tree.leaves(given):
                raise InputError(f"{name} is {shown(given)}, which has no arrays")
        _check_values(parameters)
        _check_types(optimizer, source, checkpoints)
        shapes = abstract(batch)
        check_examples(shapes)
        self._job = Job(
            loss_function,
            parameters,
            shapes,
            optimizer,
            plan,
            source,
            runtime.deadline,
            has_aux=has_aux,
        )
        self._placement: Placement = build(self._job)
        self.plan = plan
        self.steps_done = 0
        self.examples_done = 0
        self.reports: list[StepReport] = []
        self._timed: list[StepReport] = []
        self._started = self._closed = False
        self._lock = threading.RLock()
        self._runtime = runtime
        self._left = LeftPlans()
        self._checkpoints = (
            None
            if workdir is None
            else RunCheckpoints(workdir, checkpoints or CheckpointOptions(), source)
        )
        try:
            self._executor: Executor = (
                RayExecutor(self._job, self._placement, runtime)
                if isinstance(runtime, RayOptions)
                else self._local_executor(self._job, self._placement)
            )
        except BaseException:
            if self._checkpoints is not None:
                self._checkpoints.close()
            raise

    def _local_executor(self, job: Job, placement: Placement) -> LocalExecutor:
        assert isinstance(self._runtime, LocalOptions), self._runtime
        play, devices = self._runtime.play, self._runtime.devices
        if play is None:
            return LocalExecutor(job, placement, devices)
        return PlayedExecutor(job, placement, play, devices)

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        try:
            self.close()
        except Exception as another:
            if error is None:
                raise
            error.add_note(f"Closing the trainer: {another}")

    @_one_at_a_time
    def train_step(self, batch: PyTree | None = None, *, timed: bool = False) -> StepMetrics:
        """Train on one batch.

        Args:
            batch: the batch; None to take it from the source. On Ray each worker is given the rows
                of it that it needs, by the driver; one from the source it reads by itself.
            timed: record when every operation ran, for `timeline`; the step is a little slower.

        Returns:
            The step's metrics.

        Raises:
            InputError: the batch does not have the planned shape, the workdir holds checkpoints
                that were not resumed from, or a step before was cut off.
            WorkerLostError: a worker died or stopped answering.
        """
        check_flag("timed", timed)
        if self._checkpoints is not None:
            self._checkpoints.check_ours()
        self._start()
        self._check_whole()
        if batch is None and self._job.source is None:
            raise InputError("train_step was given no batch, and the trainer has no source")
        player = self.rehearse(batch)
        began = time.perf_counter()
        self.reports = self._executor.train_step(self.examples_done, batch, timed=timed)
        seconds = (time.perf_counter() - began) / (player.scale if player else 1.0)
        self.steps_done += 1
        self.examples_done += self.plan.batch_size
        if timed:
            self._timed = self.reports
        return step_metrics(self.steps_done, self.reports, self._placement.pipelines, seconds)

    @_one_at_a_time
    def rehearse(self, batch: PyTree | None = None) -> Player | None:
        """See what tasks take on this machine, and choose the scale at which a cluster is played.

        It is done before the first step anyway, and once. The steps of a rehearsal leave no trace.

        Args:
            batch: a batch; None to take one from the source.

        Returns:
            What paces the training steps: its `scale` is how many seconds here are one of the
            cluster. None where nothing is played.

        Raises:
            InputError: the batch does not have the planned shape, or a step before was cut off.
        """
        self._start()
        self._check_whole()
        if not isinstance(self._executor, PlayedExecutor):
            return None
        return self._executor.rehearse(self.examples_done, batch)

    @_one_at_a_time
    def use_schedule(self, schedule: Schedule) -> None:
        """Train on with another schedule; what is computed stays the same.

        Programs that it needs beside those of the schedules before are compiled; workers, state and
        connections stay.

        Args:
            schedule: of as many stages and microbatches as the plan's.

        Raises:
            InputError: the schedule does not fit the plan, or the plan has several pipelines.
        """
        self._check_open()
        if not isinstance(schedule, Schedule):
            raise InputError(f"schedule is {shown(schedule)}; give a hetjax Schedule, not its name")
        plan = self.plan.with_schedule(schedule)
        validate(plan)
        try:
            self._executor.use_schedule(schedule)
        except BaseException:
            # Some workers may have it: by two schedules they would wait for each other.
            self._executor.use_schedule(self.plan.pipeline.schedule)
            raise
        self.plan = plan

    @_one_at_a_time
    def measure(
        self, batch: PyTree | None = None, *, rounds: int = 2, known: StepTimes | None = None
    ) -> StepTimes:
        """Train a few steps and tell what their tasks and transfers took.

        The steps are training steps like all others: half of them with whole backward passes, half
        with split ones, by 1F1B. Where these times are known already, by the trainer's own
        schedule, in which transfers and computation meet as they will. The trainer's schedule is
        the same afterwards.

        Args:
            batch: the batch of these steps; None to take each from the source.
            rounds: measured steps of each sort; one before them warms up.
            known: what an earlier call returned.

        Returns:
            The times, which `hetjax.planner.choose_schedule` and `reschedule` take.

        Raises:
            InputError: `rounds` is no whole number of 1 or more, `known` are no times, or as
                `train_step` does.
        """
        steps = measuring(self, batch, rounds=rounds, known=known)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                return end.value

    @_one_at_a_time
    def use_plan(self, plan: Plan | str | os.PathLike[str]) -> None:
        """Train on by a plan that differs in its schedule and its prediction alone.

        Args:
            plan: what `hetjax.planner.reschedule` or `choose_schedule` made of the trainer's plan,
                or the path of its file.

        Raises:
            InputError: the plan differs in more.
        """
        plan = as_plan(plan)
        if self.plan.with_schedule(plan.pipeline.schedule) != replace(plan, prediction=None):
            raise InputError(
                "the plan differs from the trainer's in more than its schedule; a trainer keeps "
                "its stages and devices"
            )
        self.use_schedule(plan.pipeline.schedule)
        self.plan = plan

    @_one_at_a_time
    def switch(
        self, plan: Plan | str | os.PathLike[str], *, lost: Set[int] = frozenset()
    ) -> SwitchPlan:
        """Train on by another plan: the training state moves to its stages, in memory.

        Parameters and optimizer state keep every bit, step counters too. In one process the state
        moves in small groups of leaves, so that hardly more than one state is there at any time;
        programs of the last two plans are kept, and coming back to one of them compiles nothing. On
        Ray the workers of one plan end before those of the other have their devices, and the state
        waits in Ray's memory. Where the plan does not fit the model, the batch or the cluster, the
        trainer is as it was; so it is where moving fails in one process.

        Args:
            plan: for the same model, batch and cluster, or the path of its file; any stages,
                shardings, pipelines.
            lost: devices of the cluster that are not to be asked any more, beside those that the
                plan names as lost: the others give what they have too.

        Returns:
            What was moved.

        Raises:
            InputError: the plan is for another cluster, or does not fit the model or the batch;
                it uses a lost device, or only lost devices hold a part of the state.
            WorkerLostError: a worker died while the state moved; go on from the last checkpoint.

        Source: Hetu v2, section 6.
        """
        plan = as_plan(plan)
        if plan.cluster != self.plan.cluster:
            raise InputError(
                f"switch: the plan is for cluster {plan.cluster.name!r}, the trainer's devices are "
                f"those of {self.plan.cluster.name!r}; make plans for one cluster, in which a plan "
                f"need not use every device"
            )
        for name, each in (("the trainer's plan", self.plan), ("the plan", plan)):
            if shared := next((group for group in each.sharing if len(group) > 1), None):
                raise InputError(
                    f"switch: {name} has stages {list(shared)} on the same devices, between which "
                    f"and others no state moves in memory; save a checkpoint and go on from it"
                )
        lost = all_lost(lost, plan)
        self._start()
        self._check_whole()
        if self._checkpoints is not None:
            self._checkpoints.settle()
        source, destination = _without_prediction(self.plan), _without_prediction(plan)
        if source == destination:
            self.plan = plan
            return SwitchPlan((), ())
        if isinstance(self._executor, RayExecutor):
            return self._switch_workers(self._executor, plan, lost)
        assert isinstance(self._executor, LocalExecutor), self._executor
        chosen = self._left.take(destination) or self._compiled(plan)
        try:
            moved = chosen.executor.take_over(self._executor, lost)
        except BaseException:
            self._left.keep(destination, chosen)
            raise
        self._left.keep(source, CompiledPlan(self._job, self._placement, self._executor))
        self._job, self._placement, self._executor = chosen
        self.plan, self.reports, self._timed = plan, [], []
        return moved

    @seldom_collected()
    def _compiled(self, plan: Plan) -> CompiledPlan:
        job = replace(self._job, plan=plan)
        placement = build(job)
        return CompiledPlan(job, placement, self._local_executor(job, placement))

    @seldom_collected()
    def _switch_workers(self, executor: RayExecutor, plan: Plan, lost: Set[int]) -> SwitchPlan:
        """Switch to workers of another plan, in processes of their own."""
        job = replace(self._job, plan=plan)
        placement = build(job)
        self._executor, moved = executor.switch_to(job, placement, lost)
        self._job, self._placement = job, placement
        self.plan, self.reports, self._timed = plan, [], []
        return moved

    @seldom_collected()
    def _start(self) -> None:
        self._check_open()
        if not self._started:
            self._executor.start()
            self._started = True

    @property
    @_one_at_a_time
    def num_held_out(self) -> int:
        """How many held-out batches there are to evaluate on; 0 without a source.

        Raises:
            InputError: the source's are not of the planned kind.
        """
        self._check_open()
        return 0 if self._job.source is None else self._executor.num_held_out()

    @_one_at_a_time
    def evaluate(self, max_batches: int | None = None) -> float:
        """The mean loss over the source's held-out batches.

        Args:
            max_batches: how many of them to use; None for all.

        Returns:
            The loss.

        Raises:
            InputError: there is no source, it holds nothing out, or a step before was cut off.
        """
        return self.evaluate_with_aux(max_batches)[0]

    @_one_at_a_time
    def evaluate_with_aux(self, max_batches: int | None = None) -> tuple[float, PyTree[float]]:
        """The mean loss over the held-out batches, and the means of what it gives beside itself.

        Args:
            max_batches: how many of them to use; None for all.

        Returns:
            The loss, and the figures as in `StepMetrics.aux`: None without `has_aux`.

        Raises:
            InputError: there is no source, it holds nothing out, or a step before was cut off.
        """
        self._start()
        self._check_whole()
        if max_batches is not None:
            check_count("max_batches", max_batches)
        available = self.num_held_out
        count = available if max_batches is None else min(available, max_batches)
        if count < 1:
            raise InputError("there are no held-out batches to evaluate on")
        total, number, *figures = summed([self._executor.evaluate(i) for i in range(count)])
        # As JAX has it: of nothing there is no mean.
        return total / number if number else math.nan, aux_means(self._placement.pipelines, figures)

    @property
    def has_workdir(self) -> bool:
        """Whether there is a workdir to save checkpoints in."""
        return self._checkpoints is not None

    @_one_at_a_time
    def save(self, *, wait: bool = False) -> None:
        """Save a checkpoint of the current step, in the background.

        Where it cannot be written, training is not affected: `failed_save` tells, `finish_saving`
        and `close` raise, and the next save tries again.

        Args:
            wait: return only when it is on the disk.

        Raises:
            InputError: the trainer has no workdir, or one with checkpoints that were not resumed
                from.
            SaveError: it was to wait, and the checkpoint could not be written.
            WorkerLostError: a worker died or stopped answering.
        """
        if self._checkpoints is None:
            raise InputError("the trainer has no workdir to save checkpoints in")
        self._start()
        self._check_whole()
        data = DataPosition(self.examples_done, self.plan.batch_size)
        metadata = {"stages": len(self.plan.stages)}
        self._checkpoints.save(self.steps_done, self._executor, data, metadata)
        if wait:
            self.finish_saving()

    @_one_at_a_time
    def finish_saving(self) -> None:
        """Wait until what was last saved is on the disk.

        Raises:
            SaveError: it could not be written; each failure is raised once.
            WorkerLostError: a worker died or stopped answering.
        """
        if self._checkpoints is not None:
            self._checkpoints.finish()

    @property
    def failed_save(self) -> SaveError | None:
        """Why the last save that has ended could not be written; None where it was."""
        return None if self._checkpoints is None else self._checkpoints.failed

    @_one_at_a_time
    def resume(self, *, or_start: bool = False, allow_changed_data: bool = False) -> list[str]:
        """Restore the newest whole checkpoint of the workdir, whatever plan saved it.

        The data go on at the example after the last one seen, also with another batch size.

        Args:
            or_start: begin at step 0 where there is no checkpoint; what the trainer has done so far
                is given up then.
            allow_changed_data: go on also where the data are not those of the checkpoint.

        Returns:
            What was done, in sentences for people.

        Raises:
            CheckpointError: there is no checkpoint, or none is whole, or the newest whole one is of
                another model or other data.
            InputError: the trainer has no workdir.
        """
        self._check_open()
        if self._checkpoints is None:
            raise InputError("the trainer has no workdir to resume from")
        # What was saved last is the newest.
        self._checkpoints.settle()
        restored = restore(
            self._checkpoints,
            self._executor,
            self._job,
            self._placement.pipelines,
            or_start=or_start,
            allow_changed_data=allow_changed_data,
        )
        # Where there was none, the state is made anew when it is next asked for.
        self._started = restored.step is not None
        self.steps_done, self.examples_done = restored.step or 0, restored.examples
        return restored.messages

    @_one_at_a_time
    def parameters(self) -> PyTree[np.ndarray]:
        """The parameters as NumPy arrays, gathered from all stages.

        Raises:
            InputError: a step before was cut off.
        """
        self._start()
        self._check_whole()
        return whole_parameters(self._placement.pipelines, self._executor.parameters())

    def timeline(self) -> Timeline:
        """When every operation of the last timed step ran, on every stage and link.

        Raises:
            InputError: no step was timed.
        """
        reports = self._timed_reports()
        events = [event for report in reports for event in report.events]
        return Timeline((*events, *link_events(reports))).from_zero()

    @property
    def carrier_curves(self) -> CarrierCurves:
        """What was measured of the carriers on the links between workers; nothing in one process.

        By it every message has the carrier that is the fastest for its size.
        """
        found = self._executor
        return found.carrier_curves if isinstance(found, RayExecutor) else CarrierCurves()

    def link_uses(self) -> list[LinkUse]:
        """What the links between stages and among members did in the last timed step.

        Raises:
            InputError: no step was timed.
        """
        return link_uses(self._timed_reports())

    def _timed_reports(self) -> list[StepReport]:
        if not self._timed:
            raise InputError("no step was timed; call train_step(timed=True)")
        return self._timed

    def close(self) -> None:
        """Finish saving and end all workers. Closing twice does no harm.

        Raises:
            SaveError: the last save has failed, and it was not raised yet.
        """
        self._closed = True
        try:
            if self._checkpoints is not None:
                self._checkpoints.close()
        finally:
            self._executor.close()
            self._left.close()

    def _check_whole(self) -> None:
        """Check that the state is that of a step, all of it.

        Whoever interrupts a step, as in a notebook, leaves sums of some microbatches' gradients, or
        parameters of two steps.
        """
        if self._executor.is_cut_off:
            raise InputError(
                "a training step or a switch was cut off, and the state is between two steps; go "
                "on from a checkpoint by resume(), or make another trainer"
            )

    def _check_open(self) -> None:
        if self._closed:
            raise InputError(_CLOSED)


def _check_workdir(workdir: object) -> None:
    """Check that there could be such a folder."""
    if not isinstance(workdir, str | os.PathLike):
        raise InputError(f"workdir is {shown(workdir)}; give the path of a folder, or None")
    check_path(workdir, "workdir")


def _check_values(parameters: PyTree | Callable[[], PyTree]) -> None:
    """Check that parameters are there, not their shapes, with which a plan is made."""
    if callable(parameters):
        return
    leaves = jax.tree.leaves(parameters)
    for name, leaf in zip(path_names(parameters), leaves, strict=True):
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise InputError(
                f"parameters: {name!r} is {shown(leaf)}, a shape; a trainer needs the arrays, or "
                f"the function that makes them"
            )


def _check_types(optimizer: object, source: object, checkpoints: object) -> None:
    """Check what would fail where it is first used, with an error of Python's."""
    if not all(callable(getattr(optimizer, name, None)) for name in ("init", "update")):
        raise InputError(
            f"optimizer is {shown(optimizer)}; it must be an Optax transformation, such as "
            f"optax.adam(1e-3)"
        )
    wanted = ("batch", "held_out_batches")
    if source is not None and not all(callable(getattr(source, each, None)) for each in wanted):
        raise InputError(
            f"source is {shown(source)}; it must have the methods {' and '.join(wanted)}, or be "
            f"None"
        )
    if checkpoints is not None and not isinstance(checkpoints, CheckpointOptions):
        raise InputError(
            f"checkpoints is {shown(checkpoints)}; give hetjax.runtime.CheckpointOptions(), or None"
        )


def _without_prediction(plan: Plan) -> str:
    """What tells plans apart that compute in other ways."""
    bare = replace(plan, prediction=None, planner="", lost_devices=(), notes=())
    return json.dumps(bare.to_json_dict())
