"""Models and context splits of which predictions are compared with what is measured.

A case is a small GPT or Llama whose stages share the context as ring attention, Ulysses or USP do,
evenly or not.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
import optax

from hetjax.mesh import Cluster, SubMesh
from hetjax.models import GPTConfig, LanguageModel, LlamaConfig, language_model
from hetjax.pipeline.schedules.warm_up import one_f_one_b
from hetjax.planner import (
    Member,
    PipelinePlan,
    Plan,
    PlanningProblem,
    Shares,
    StagePlan,
    make_problem,
)
from hetjax.sharding.context import ContextGroup, ContextSplit

WIDTH, HEADS, BLOCKS, VOCABULARY, BATCH = 128, 8, 2, 512, 2
KEY_VALUE_HEADS = {"gpt": HEADS, "llama": 2}

Group = tuple[tuple[int, int], ...]
"""For each member of a group its parts of the tokens and how many heads it has."""


@dataclass(frozen=True)
class Case:
    """A model, and how the members of its stages share one sequence.

    Args:
        model: "gpt" or "llama", whose query heads share heads of keys and values by fours.
        sequence: tokens.
        stages: of each stage its groups; tokens in any parts, which are brought to whole numbers.
        recompute: whether stages make their forward pass again.
        microbatches: of a step.
        mbit: of the lab's links, in Mbit/s; None for no limit.
        tensor: how many devices each member is, which divide its parameters.
    """

    model: str
    sequence: int
    stages: tuple[tuple[Group, ...], ...]
    recompute: bool = False
    microbatches: int = 1
    mbit: float | None = None
    tensor: int = 1

    @property
    def name(self) -> str:
        """The case, for people."""
        splits = " | ".join(_words(split) for split in self.splits)
        marks = f", tensor {self.tensor}" if self.tensor > 1 else ""
        marks += ", recomputed" if self.recompute else ""
        rate = "" if self.mbit is None else f", {self.mbit:g} Mbit/s"
        return f"{self.model} {self.sequence}: {splits}{marks}{rate}"

    @property
    def splits(self) -> tuple[ContextSplit, ...]:
        """The context split of each stage."""
        return tuple(_split(self, groups) for groups in self.stages)

    @property
    def language(self) -> LanguageModel:
        """The model."""
        return language_of(self.model, self.sequence)


def language_of(model: str, sequence: int) -> LanguageModel:
    """A small language model.

    Args:
        model: "gpt" or "llama".
        sequence: tokens.
    """
    size: dict[str, Any] = {"blocks": BLOCKS, "width": WIDTH, "heads": HEADS}
    size |= {"vocabulary": VOCABULARY, "sequence": sequence}
    if model == "gpt":
        return language_model(GPTConfig(**size))
    return language_model(
        LlamaConfig(**size, key_value_heads=KEY_VALUE_HEADS[model], ffn_width=3 * WIDTH)
    )


def _split(case: Case, groups: Sequence[Group]) -> ContextSplit:
    parts = [part for group in groups for part, _ in group]
    ends = [round(case.sequence * end / sum(parts)) for end in itertools.accumulate(parts)]
    tokens = iter(stop - start for start, stop in itertools.pairwise([0, *ends]))
    made, first = [], 0
    for group in groups:
        marks = [0, *itertools.accumulate(heads for _, heads in group)]
        devices = tuple(range(first, first + len(group)))
        own = tuple(next(tokens) for _ in group)
        made.append(ContextGroup(devices, own, tuple(itertools.pairwise(marks))))
        first += len(group)
    return ContextSplit(case.sequence, HEADS, KEY_VALUE_HEADS[case.model], tuple(made))


def _words(split: ContextSplit) -> str:
    """A split, for people: members of a group by +, groups by /."""
    tokens = " / ".join(" + ".join(map(str, group.tokens)) for group in split.groups)
    heads = " / ".join(" + ".join(map(str, group.head_counts)) for group in split.groups)
    return f"{tokens} tokens, {heads} heads"


def problem_of(case: Case, cluster: Cluster) -> PlanningProblem:
    """What a case's plan solves.

    Args:
        case: the case.
        cluster: the devices.
    """
    language = case.language
    return make_problem(
        language.loss,
        jax.eval_shape(language.init, jax.random.key(0)),
        tokens_of(case),
        cluster=cluster,
        optimizer=optimizer(),
        num_microbatches=case.microbatches,
        divides_sequences=True,
    )


def tokens_of(case: Case) -> dict[str, np.ndarray]:
    """A batch of random tokens, always the same."""
    shape = BATCH, case.sequence + 1
    return {"tokens": np.random.default_rng(0).integers(0, VOCABULARY, shape, dtype=np.int32)}


def optimizer() -> optax.GradientTransformation:
    """The benchmark's optimizer."""
    return optax.adam(1e-3)


def plan_of(case: Case, problem: PlanningProblem) -> Plan:
    """The plan of a case, without a prediction: its members have the cluster's devices, in order.

    Args:
        case: the case.
        problem: what it solves.
    """
    shape = 1, case.tensor
    devices = (
        SubMesh(part.name, place, shape)
        for part in problem.cluster.subclusters
        for place in range(0, part.num_devices, case.tensor)
    )
    count, splits = len(case.stages), case.splits
    edges = [round(problem.num_layers * s / count) for s in range(count + 1)]
    stages = []
    for layers, split in zip(itertools.pairwise(edges), splits, strict=True):
        members = tuple(Member(next(devices), shape) for _ in split.devices)
        stage = StagePlan(layers, members, shares=Shares(context=split))
        stages.append(replace(stage, recompute=case.recompute))
    pipeline = PipelinePlan(
        tuple(stages),
        case.microbatches,
        BATCH // case.microbatches,
        one_f_one_b(count, case.microbatches),
    )
    return Plan(problem.program.fingerprint, problem.layers, problem.cluster, (pipeline,))


def ring(*parts: int) -> tuple[Group, ...]:
    """Each member is a group, and has all heads."""
    return tuple(((part, HEADS),) for part in parts)


def exchange(*members: tuple[int, int]) -> tuple[Group, ...]:
    """All members are one group: their parts of the tokens, and their heads."""
    return (tuple(members),)
