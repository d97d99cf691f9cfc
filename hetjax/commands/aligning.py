"""An alignment of a configured model: what is compared with what, captured or replayed."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jaxtyping import PyTree

from hetjax.alignment import (
    Injection,
    KindDevice,
    KindTraining,
    OperatorProgram,
    bind_kind,
    compare_kinds,
    trace_operators,
    train_kind,
)
from hetjax.alignment.capture_file import (
    Capture,
    captured_training,
    check_same_model,
    check_same_training,
    read_capture,
)
from hetjax.alignment.captures import check_limit, replay, write_capture
from hetjax.alignment.comparison import Comparison, Told
from hetjax.alignment.result import Alignment, NamedKind, named_kind
from hetjax.commands.alignment_options import AlignmentOptions
from hetjax.configuration import Configuration, settings
from hetjax.configuration.make import Ingredients, make_ingredients, make_model
from hetjax.errors import InputError, shown
from hetjax.models import Model
from hetjax.pipeline.program.loss import host_array

_TRAINED_BY = (
    "model.",
    "optimizer.",
    "train.frozen",
    "train.seed",
    "train.batch_size",
    "train.steps",
)
"""The settings that losses depend on, besides the data."""


def align(configuration: Configuration, options: AlignmentOptions, told: Told) -> Alignment:
    """Do what the options ask for.

    Args:
        configuration: the model, the data and the optimizer.
        options: what is compared, captured or replayed.
        told: is told of each piece of work.

    Returns:
        What came of it.

    Raises:
        InputError: a kind is not here, does not have the model's dtype, or a capture is damaged or
            of another model.
    """
    capture = None if options.replay is None else read_capture(options.replay)
    model = make_model(configuration.model, configuration.data)
    # Traced on shapes: what does not fit together is found before anything is made.
    shapes = model.batch_shapes(configuration.train.batch_size)
    program = trace_operators(model.loss, model.parameter_shapes(), shapes)
    kinds = tuple(bind_kind(each, dtypes=program.product_dtypes) for each in options.kinds)
    _check_operators(options, program)
    if capture is not None:
        check_same_model(capture, program)
        _check_captured(options, capture)
    if options.capture is not None:
        check_limit(program, options.operators, options.limit)
    task = _Task(model, program, kinds, options, _injection(options, program), told)
    if capture is None:
        return _aligned_here(task, _Run(make_ingredients(configuration), task))
    steps = min(options.steps, capture.steps)
    if not steps:
        # The capture has all that it takes: no data need to be here.
        return task.result(_captured(capture), kinds, _replayed(task, capture), (), capture)
    run = _Run(make_ingredients(configuration), task)
    check_same_training(capture, run.training_identity)
    comparison = _replayed(task, capture)
    reference = captured_training(capture, program, _captured(capture).name, steps)
    trainings = (reference, *run.train(kinds, steps))
    return task.result(_captured(capture), kinds, comparison, trainings, capture)


@dataclass(frozen=True)
class _Task:
    """What is aligned: a model's operators on kinds."""

    model: Model
    program: OperatorProgram
    kinds: tuple[KindDevice, ...]
    options: AlignmentOptions
    injection: Injection | None
    told: Told

    def injected(self, kind: KindDevice) -> KindDevice:
        """A kind with the error that is put into it, as of the first step."""
        asked, injection = self.options.inject, self.injection
        if injection is None or asked is None or asked.kind != kind.kind.name:
            return kind
        return replace(kind, replacements={injection.operator: injection.replacement(1)})

    def result(
        self,
        reference: NamedKind,
        kinds: Sequence[KindDevice],
        comparison: Comparison,
        trainings: tuple[KindTraining, ...],
        capture: Capture | None,
    ) -> Alignment:
        """What came of it."""
        return Alignment(
            self.model.name,
            self.program,
            reference,
            tuple(map(named_kind, kinds)),
            comparison,
            trainings,
            self.options.steps,
            None if capture is None else capture.size,
        )


def _aligned_here(task: _Task, run: _Run) -> Alignment:
    """Kinds of this process, the first of them as the reference; captured where that is wanted."""
    options, program = task.options, task.program
    reference, others = task.kinds[0], task.kinds[1:]
    trainings: tuple[KindTraining, ...] = ()

    def train() -> KindTraining | None:
        nonlocal trainings
        trainings = run.train(task.kinds, options.steps)
        return trainings[0] if trainings else None

    capture = None
    if options.capture is None:
        train()
    else:
        capture = write_capture(
            options.capture,
            program,
            run.inputs,
            reference,
            wanted=options.operators,
            limit=options.limit,
            train=train,
            training=run.training_identity,
            told=task.told,
        )
    comparison = Comparison((), options.tolerance)
    if others:
        comparison = compare_kinds(
            program,
            run.inputs,
            reference,
            tuple(map(task.injected, others)),
            tolerance=options.tolerance,
            wanted=options.operators,
            told=task.told,
        )
    return task.result(named_kind(reference), others, comparison, trainings, capture)


def _replayed(task: _Task, capture: Capture) -> Comparison:
    options = task.options
    assert options.replay is not None, "there is a capture"
    return replay(
        options.replay,
        capture,
        task.program,
        tuple(map(task.injected, task.kinds)),
        tolerance=options.tolerance,
        wanted=options.operators,
        told=task.told,
    )


class _Run:
    """A run of the configured model: its first parameters, its batches, its training."""

    def __init__(self, ingredients: Ingredients, task: _Task) -> None:
        self._ingredients, self._task = ingredients, task

    @functools.cached_property
    def parameters(self) -> PyTree:
        """The first parameters, made where all kinds get them from."""
        with jax.default_device(_host()):
            return jax.device_get(self._ingredients.parameters())

    def batch(self, step: int) -> Mapping[str, Any]:
        """The batch that comes after so many steps."""
        ingredients = self._ingredients
        return ingredients.dataset.batch(step, ingredients.configuration.train.batch_size)

    @property
    def inputs(self) -> list[Any]:
        """What the first step computes on."""
        leaves = [*jax.tree.leaves(self.parameters), *jax.tree.leaves(self.batch(0))]
        return [host_array(leaf) for leaf in leaves]

    @property
    def training_identity(self) -> dict[str, str]:
        """What losses depend on besides the operators."""
        configured = dict(settings(self._ingredients.configuration))
        chosen = {n: repr(v) for n, v in configured.items() if n.startswith(_TRAINED_BY)}
        data = json.dumps(self._ingredients.dataset.fingerprint(), sort_keys=True)
        return {**chosen, "the data": data}

    def train(self, kinds: Sequence[KindDevice], steps: int) -> tuple[KindTraining, ...]:
        """The same training on each kind; none where there are no steps."""
        if not steps:
            return ()
        asked = self._task.options.inject
        return tuple(
            train_kind(
                self._task.program,
                kind,
                self._ingredients.optimizer,
                self.parameters,
                self.batch,
                steps,
                injection=self._task.injection if asked and asked.kind == kind.kind.name else None,
                told=self._task.told,
            )
            for kind in kinds
        )


def _host() -> Any:
    try:
        return jax.devices("cpu")[0]
    except RuntimeError:  # Of a process that was told to have none.
        return jax.devices()[0]


def _check_operators(options: AlignmentOptions, program: OperatorProgram) -> None:
    last = len(program.operators) - 1
    if options.operators is not None and max(options.operators) > last:
        raise InputError(
            f"--operators: {max(options.operators)} is not allowed: there are 0 to {last}"
        )


def _check_captured(options: AlignmentOptions, capture: Capture) -> None:
    captured = {run.number for run in capture.operators}
    if options.operators is not None and not captured & options.operators:
        raise InputError(
            f"--operators: the capture has none of these; it has {shown(sorted(captured))}"
        )


def _injection(options: AlignmentOptions, program: OperatorProgram) -> Injection | None:
    if options.inject is None:
        return None
    injection = Injection(options.inject.operator, options.inject.size, options.inject.step)
    injection.check(program)
    return injection


def _captured(capture: Capture) -> NamedKind:
    """The reference of a capture, told from a kind of the same name that is here."""
    return replace(capture.reference, name=f"{capture.reference.name}, captured")
