"""The run itself: a trainer, its loop, and the files and lines that come of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import jax

from hetjax.commands.command_line import NOT_WRITTEN
from hetjax.commands.measured import (
    TimedStep,
    carrier_rows,
    link_rows,
    live_microbatches,
    prediction_rows,
)
from hetjax.commands.playing import check_duration, lateness, playing, scale_words
from hetjax.commands.prepare import Prepared
from hetjax.commands.signals import EXIT_BASE, StopRequest, doing
from hetjax.commands.step_figures import StepFigures
from hetjax.commands.work_folder import (
    CARRIERS_FILE,
    CHECKPOINTS_FOLDER,
    PAGE_FILE,
    PICTURE_FILE,
    PLAN_FILE,
    PREDICTION_FILE,
    TIMELINE_FILE,
    Resumption,
    check_work_folder,
    earlier_configuration,
    save_configuration,
)
from hetjax.configuration import Configuration, changes, settings
from hetjax.errors import InputError, SaveError, reason_of
from hetjax.loop import StepDone, keeps_schedules, other_step_time, train, usual_step_time
from hetjax.pipeline.program.traced_program import with_examples
from hetjax.pipeline.program.tracing import trace
from hetjax.pipeline.update.traced_update import settled_init
from hetjax.planner import Plan, choose_schedule, simulate
from hetjax.report import (
    MetricsWriter,
    PredictionRow,
    TrainingProgress,
    carrier_table,
    draw_timeline,
    format_rate,
    format_seconds,
    link_table,
    prediction_table,
    write_chrome_trace,
    write_prediction,
    write_timeline_page,
)
from hetjax.report.metrics import METRICS_FILE, read_metrics
from hetjax.runtime import (
    CarrierCurves,
    CheckpointOptions,
    LocalOptions,
    RayOptions,
    Trainer,
)
from hetjax.runtime.checkpoints.saving import check_resumable
from hetjax.runtime.checkpoints.traced_model import TracedModel
from hetjax.runtime.workers.step_report import StepReport, exchange_seconds

if TYPE_CHECKING:
    from rich.console import Console

Say = Callable[[str], None]
"""Prints a line of plain text."""

_TIMED_STEPS = 3
"""How many timed steps count for the table, the last ones."""


def run(prepared: Prepared, console: Console, workdir: Path | None, resumption: Resumption) -> int:
    """Train as prepared.

    Args:
        prepared: the model, the data, the optimizer and the plan.
        console: where to print.
        workdir: folder for the run's files; None for none.
        resumption: whether to go on with the run that is in it, and how.

    Returns:
        The command's exit code.

    Raises:
        InputError: the devices are not there, the checkpoints are of another model or other data,
            or the work folder cannot be written to.
        WorkerLostError: a worker died or stopped answering.
    """

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    unwritten = Unwritten(say)
    if workdir is not None and resumption.wanted:
        ingredients = prepared.ingredients
        shapes = ingredients.parameter_shapes
        check_resumable(
            workdir,
            _model_of(prepared),
            ingredients.dataset,
            jax.eval_shape(settled_init(ingredients.optimizer, shapes), shapes),
            allow_changed_data=resumption.allow_changed_data,
        )
    began = time.perf_counter()
    doing("compiling")
    is_ray = prepared.ingredients.configuration.runtime.name == "ray"
    curves = _kept_curves(workdir, resumption, say) if is_ray else CarrierCurves()
    with _trainer(prepared, workdir, curves) as trainer:
        say(f"stages compiled in {format_seconds(time.perf_counter() - began)}")
        if workdir is not None:
            # Another run may have begun and ended in it since it was looked at.
            check_work_folder(workdir, resumption)
            if resumption.wanted:
                _resume(trainer, prepared, workdir, resumption, say)
        _rehearse(trainer, prepared, say)
        if workdir is not None:
            save_configuration(workdir, prepared.ingredients.configuration)
            _write_plan(prepared.plan, workdir)
            if trainer.carrier_curves.links:
                with unwritten.writing(CARRIERS_FILE):
                    trainer.carrier_curves.save(workdir / CARRIERS_FILE)
        if reason := keeps_schedules(prepared.plan):
            wanted = prepared.ingredients.configuration.train
            for name, is_wanted in (("tune", wanted.tune), ("beside", wanted.beside)):
                if is_wanted:
                    say(f"train.{name} has no effect: {reason}")
        doing("training")
        with StopRequest() as stop:
            seen = _train(trainer, prepared, console, workdir, stop, unwritten)
        doing("writing the results of the run")
        _say_end(trainer, seen.steps, stop, workdir, say)
        if seen.steps:
            _report(trainer, prepared, seen, console, workdir, unwritten)
    if unwritten.files:
        return NOT_WRITTEN
    return 0 if stop.signal is None else EXIT_BASE + stop.signal


class Unwritten:
    """The files that a run could not write, told as it comes to know.

    Args:
        say: tells.

    Attributes:
        files: what to call those that are missing, or lack something, at the end.
    """

    def __init__(self, say: Say):
        self.say = say
        self.files: list[str] = []

    @contextmanager
    def writing(self, name: str) -> Iterator[None]:
        """Write a file: where it cannot be written, that is told, and the run goes on."""
        try:
            yield
        except OSError as error:
            self.add(name, reason_of(error))

    def add(self, name: str, reason: str) -> None:
        """Note and tell that a file could not be written."""
        self.files.append(name)
        self.say(f"{name} was not written: {reason}")


def _model_of(prepared: Prepared) -> TracedModel:
    """The loss that the run's checkpoints must be of, which knows no plan."""
    ingredients = prepared.ingredients

    def fingerprint_for(num_examples: int) -> str:
        shapes = with_examples(ingredients.batch, num_examples)
        return trace(ingredients.model.loss, ingredients.parameter_shapes, shapes).model

    return TracedModel(prepared.plan.pipelines[0].microbatch_size, fingerprint_for)


def _write_plan(plan: Plan, workdir: Path) -> None:
    try:
        plan.save(workdir / PLAN_FILE)
    except OSError as error:
        raise InputError(
            f"--workdir {workdir}: {PLAN_FILE} cannot be written: {error.strerror}"
        ) from None


def _kept_curves(workdir: Path | None, resumption: Resumption, say: Say) -> CarrierCurves:
    """What the run that is gone on with has measured of carriers.

    It saves time and nothing else: where it cannot be read, that is told, and it is measured anew.
    """
    if workdir is None or not resumption.wanted or not (workdir / CARRIERS_FILE).exists():
        return CarrierCurves()
    try:
        return CarrierCurves.load(workdir / CARRIERS_FILE)
    except InputError as error:
        say(f"{error}; carriers are measured anew")
        return CarrierCurves()


def _trainer(prepared: Prepared, workdir: Path | None, curves: CarrierCurves) -> Trainer:
    ingredients = prepared.ingredients
    settings = ingredients.configuration.train
    return Trainer(
        prepared.plan,
        ingredients.model.loss,
        ingredients.parameters,
        ingredients.optimizer,
        ingredients.batch,
        source=ingredients.dataset,
        workdir=workdir,
        checkpoints=CheckpointOptions(settings.keep_last, settings.keep_every),
        runtime=_runtime(ingredients.configuration, prepared.plan, curves),
    )


def _runtime(
    configuration: Configuration, plan: Plan, curves: CarrierCurves
) -> LocalOptions | RayOptions:
    runtime = configuration.runtime
    if runtime.name == "ray":
        return RayOptions(
            runtime.ray_address, runtime.cores, runtime.deadline, runtime.carrier, curves
        )
    return LocalOptions(play=playing(configuration, plan), deadline=runtime.deadline)


def _rehearse(trainer: Trainer, prepared: Prepared, say: Say) -> None:
    """Finds the scale at which the cluster is played, if it is, and says it."""
    configuration = prepared.ingredients.configuration
    steps = configuration.train.steps - trainer.steps_done
    if configuration.cluster.play and configuration.runtime.name == "ray":
        say(
            "cluster.play has no effect on Ray, whose workers go as fast as their devices do; what "
            "is predicted is of the cluster in the file"
        )
    if steps <= 0 or (player := trainer.rehearse()) is None:
        return
    check_duration(configuration, prepared.plan, player.scale, steps)
    say(
        f"the cluster is played {scale_words(player.scale)}: all is really computed, and held back "
        f"to the predicted times; one second of the cluster takes {format_seconds(player.scale)} "
        f"here, and all figures are in the cluster's seconds"
    )


def _resume(
    trainer: Trainer, prepared: Prepared, workdir: Path, resumption: Resumption, say: Say
) -> None:
    messages = trainer.resume(
        or_start=resumption.or_start, allow_changed_data=resumption.allow_changed_data
    )
    for message in messages:
        say(message)
    if trainer.steps_done == 0:
        return
    earlier = earlier_configuration(workdir)
    for line in changes(earlier, prepared.ingredients.configuration) if earlier else ():
        say(f"changed since the run began: {line}")


@dataclass
class _Seen:
    """What a run leaves to be told.

    Args:
        steps: all steps.
        timed: those that were timed.
        beside: the timed one by the schedule that stands beside the plan's.
        reports: of each stage, in the last step by the plan's own schedule.
    """

    steps: list[StepDone] = field(default_factory=list)
    timed: list[TimedStep] = field(default_factory=list)
    beside: TimedStep | None = None
    reports: Sequence[StepReport] = ()

    def take(self, done: StepDone, trainer: Trainer) -> None:
        """Note a step that was just done."""
        self.steps.append(done)
        if done.beside is None:
            self.reports = trainer.reports
        if done.timed:
            step = TimedStep(trainer.timeline(), exchange_seconds(trainer.reports))
            if done.beside is None:
                self.timed.append(step)
            else:
                self.beside = step


def _train(
    trainer: Trainer,
    prepared: Prepared,
    console: Console,
    workdir: Path | None,
    stop: StopRequest,
    unwritten: Unwritten,
) -> _Seen:
    """Runs the loop, shows every step and writes its figures."""
    settings, seen = prepared.ingredients.configuration.train, _Seen()
    metrics = None if workdir is None else _metrics(workdir, trainer.steps_done + 1, prepared)
    step_figures = StepFigures(prepared.ingredients, read_metrics(workdir) if workdir else ())
    told: set[str] = set()
    tune = prepared.ingredients.configuration.planner.schedule if settings.tune else None
    loop = train(trainer, settings, checkpoints=workdir is not None, stop=stop, tune=tune)
    unit = prepared.ingredients.model.unit
    progress = TrainingProgress(
        settings.steps, steps_done=trainer.steps_done, unit=unit, console=console
    )
    try:
        with progress:
            for done in loop:
                seen.take(done, trainer)
                figures = step_figures.of(done)
                progress.update(done.metrics.step, done.metrics.loss, figures[f"{unit}_per_second"])
                why = done.metrics.nonfinite
                if why is not None:
                    progress.print(f"step {done.metrics.step} was not applied: {why}")
                if done.evaluation_loss is not None:
                    progress.print(
                        f"step {done.metrics.step}: held-out loss {done.evaluation_loss:.4f}"
                    )
                if done.failed_save is not None:
                    progress.print(f"{done.failed_save}; training goes on, the next one is tried")
                if metrics is not None:
                    before = metrics.failure
                    metrics.write(done.metrics.step, figures)
                    if metrics.failure and not before:
                        progress.print(f"metrics wait to be written: {metrics.failure}")
                    for name in metrics.lost.keys() - told:
                        progress.print(f"{name} lacks figures: {metrics.lost[name]}")
                        told.add(name)
    except SaveError as error:
        unwritten.add(f"checkpoint {error.step}", error.reason)
    finally:
        if metrics is not None:
            metrics.close()
            if metrics.failure is not None:
                unwritten.add(METRICS_FILE, metrics.failure)
            for name, why in metrics.lost.items():
                unwritten.add(f"what {name} was to hold", why)
    return seen


def _metrics(workdir: Path, first_step: int, prepared: Prepared) -> MetricsWriter:
    configuration = prepared.ingredients.configuration
    try:
        return MetricsWriter(
            workdir,
            first_step=first_step,
            writers=configuration.train.writers,
            settings=dict(settings(configuration)),
        )
    except OSError as error:
        raise InputError(
            f"--workdir {workdir}: {METRICS_FILE} cannot be written: {error.strerror}"
        ) from None


def _say_end(
    trainer: Trainer,
    steps: Sequence[StepDone],
    stop: StopRequest,
    workdir: Path | None,
    say: Say,
) -> None:
    if stop():
        where = "not saved"
        if workdir is not None and trainer.steps_done and trainer.failed_save is None:
            where = f"its checkpoint is in {workdir / CHECKPOINTS_FOLDER}"
        say(f"stopped after step {trainer.steps_done}; {where}")
    else:
        say(f"{trainer.steps_done} steps are done")
    skipped = sum(done.metrics.nonfinite is not None for done in steps)
    if skipped:
        say(f"{skipped} of them were not applied, since the loss or the gradient was not finite")


def _report(
    trainer: Trainer,
    prepared: Prepared,
    seen: _Seen,
    console: Console,
    workdir: Path | None,
    unwritten: Unwritten,
) -> None:
    """Prints predicted beside measured, and writes it and the timeline."""
    say = unwritten.say
    plan, steps, ingredients = trainer.plan, seen.steps, prepared.ingredients
    step_time, beside = usual_step_time(steps), ingredients.configuration.train.beside
    rows = prediction_rows(plan, seen.timed[-_TIMED_STEPS:], step_time)
    other_time = other_step_time(steps)
    if beside is not None and other_time is not None:
        other = simulate(choose_schedule(plan, beside))
        rows.insert(1, PredictionRow(f"step time by {beside}", other.makespan, other_time))
    console.print()
    console.print(prediction_table(rows))
    console.print()
    if seen.timed and ingredients.configuration.runtime.name == "ray":
        console.print(link_table(link_rows(plan, trainer.link_uses())))
        console.print()
        if trainer.carrier_curves.links:
            console.print(carrier_table(carrier_rows(trainer.carrier_curves)))
            console.print()
    if other_time is not None:
        name = plan.pipeline.schedule.name
        say(f"{beside} takes {other_time / step_time:.2f} times as long as {name}")
    say(live_microbatches(plan, seen.reports))
    say(
        f"loss {steps[0].metrics.loss:.4f} to {steps[-1].metrics.loss:.4f}, "
        f"{format_rate(ingredients.units_per_step / step_time, f'{ingredients.model.unit}/s')}"
    )
    player = trainer.rehearse() if ingredients.configuration.cluster.play else None
    late = player and lateness(player.late_tasks, player.tasks, player.scale)
    if late:
        say(late)
    if workdir is None:
        return
    if plan is not prepared.plan:
        with unwritten.writing(PLAN_FILE):
            plan.save(workdir / PLAN_FILE)
    name = plan.pipelines[0].schedule.name
    scale = player.scale if player else None
    with unwritten.writing(PREDICTION_FILE):
        write_prediction(rows, workdir / PREDICTION_FILE, schedule=name, scale=scale)
    where = f"{ingredients.model.name} on {plan.cluster.name}"
    if player is not None:
        where += f", played {scale_words(player.scale)}"
    if seen.timed:
        timeline = seen.timed[-1].timeline
        predicted = simulate(plan) if plan.prediction is not None else None
        title = f"{where}, step {_last_timed(steps)}"
        with unwritten.writing(TIMELINE_FILE):
            write_chrome_trace(timeline, workdir / TIMELINE_FILE)
        with unwritten.writing(PICTURE_FILE):
            draw_timeline(timeline, workdir / PICTURE_FILE, title, predicted)
        with unwritten.writing(PAGE_FILE):
            write_timeline_page(workdir / PAGE_FILE, timeline, predicted, title)
    if seen.beside is not None:
        picture = workdir / PICTURE_FILE.replace(".", f"_{beside}.")
        predicted = simulate(choose_schedule(plan, str(beside)))
        with unwritten.writing(picture.name):
            draw_timeline(seen.beside.timeline, picture, f"{where}, by {beside}", predicted)
    say(f"files are in {workdir}: {', '.join(sorted(each.name for each in workdir.iterdir()))}")


def _last_timed(steps: Sequence[StepDone]) -> int:
    return max(done.metrics.step for done in steps if done.timed and done.beside is None)
