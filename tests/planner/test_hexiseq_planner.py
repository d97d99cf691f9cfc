"""HexiSeq's planner: the work that it counts in traced programs, and the plans that it makes."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from context_models import (
    BLOCKS,
    HEADS,
    LENGTH,
    MODELS,
    VOCABULARY,
    WIDTH,
    problem_of,
    unlike_cluster,
)

import hetjax
from hetjax.errors import DoesNotFitError, InputError
from hetjax.models import LlamaConfig, language_model
from hetjax.planner import PlanningProblem, make_problem
from hetjax.planner.hexiseq.context_model import work_flops
from hetjax.planner.hexiseq.context_report import explain_context
from hetjax.planner.hexiseq.context_work import transformer_work
from hetjax.planner.hexiseq.hexiseq_planner import HexiSeqPlanner
from hetjax.planner.hexiseq.program_work import attending_layers, context_work
from hetjax.planner.plan.plan import Plan, validate, validate_for
from hetjax.sharding.context.context_split import ContextSplit


@pytest.fixture(scope="module")
def problems() -> dict[str, PlanningProblem]:
    return {name: problem_of(*make()) for name, make in MODELS.items()}


def split_of(plan: Plan) -> ContextSplit:
    split = plan.stages[0].shares.context
    assert split is not None
    return split


def test_models_of_one_shape_have_the_same_split(problems: dict[str, PlanningProblem]):
    plans = {name: HexiSeqPlanner().plan(problem) for name, problem in problems.items()}
    for name, plan in plans.items():
        validate(plan)
        validate_for(plan, problems[name].program)
    first, *others = map(split_of, plans.values())
    assert others == [first] * len(others)
    # The fast host has twice as much, since nothing else weighs here.
    assert sorted(first.group_lengths) == [round(LENGTH / 3), LENGTH - round(LENGTH / 3)]


def test_the_work_of_a_program_is_that_of_its_shape(problems: dict[str, PlanningProblem]):
    shape = transformer_work(
        LENGTH,
        width=WIDTH,
        layers=BLOCKS,
        query_heads=HEADS,
        vocabulary=VOCABULARY,
        is_tied=True,
        sequences=2,
        batch=2,
    )
    for problem in problems.values():
        found = context_work(problem)
        for field in ("length", "query_heads", "key_value_heads", "head_size", "width", "layers"):
            assert getattr(found, field) == getattr(shape, field), field
        for field in ("token_flops", "vocabulary", "sequences", "batch", "is_causal"):
            assert getattr(found, field) == getattr(shape, field), field
        # Norms, biases and tables of positions are of no product.
        assert shape.parameters <= found.parameters < 1.1 * shape.parameters
        assert shape.layer_parameters <= found.layer_parameters < 1.1 * shape.layer_parameters
        assert len(attending_layers(problem)) == BLOCKS
        assert (found.state_bytes, found.updated_bytes, found.weight_bytes) == (9.0, 8.0, 4.0)


def test_grouped_heads_and_half_precision_are_counted():
    model = language_model(
        LlamaConfig(
            vocabulary=64,
            blocks=2,
            width=32,
            heads=4,
            key_value_heads=2,
            ffn_width=64,
            sequence=16,
            compute_dtype="bfloat16",
        )
    )
    batch = {"tokens": np.zeros((4, 17), np.int32)}
    problem = make_problem(
        model.loss,
        lambda: model.init(jax.random.key(0)),
        batch,
        cluster=unlike_cluster(),
        optimizer=optax.sgd(1e-2),
        num_microbatches=2,
        divides_sequences=True,
    )
    work = context_work(problem)
    assert (work.key_value_heads, work.item_bytes, work.batch, work.sequences) == (2, 2, 2, 4)
    # The optimizer has no state; parameters and sums of gradients are in float32.
    assert (work.state_bytes, work.updated_bytes) == (9.0, 0.0)


def test_devices_that_are_lost_or_forced_even_are_as_asked(problems: dict[str, PlanningProblem]):
    problem = problems["softmax by hand"]
    even = split_of(HexiSeqPlanner("ulysses").plan(problem))
    assert (even.tokens, even.head_ranges) == ((LENGTH // 2,) * 2, ((0, 2), (2, 4)))
    alone = HexiSeqPlanner().plan(replace(problem, lost=frozenset({0})))
    assert alone.lost_devices == (0,)
    assert alone.stages[0].devices_text == "host-1[0:1] 1x1"
    with pytest.raises(InputError, match="usp: there is no legal even split of 2 devices"):
        HexiSeqPlanner("usp").plan(problem)


def test_it_says_who_has_what_and_what_others_take(problems: dict[str, PlanningProblem]):
    planner, problem = HexiSeqPlanner(), problems["flax.nnx"]
    choice = planner.choose(problem)
    report = explain_context(choice, planner.beside(problem))
    rows = [device for group in report.groups for device in group.devices]
    assert sum(row.tokens for row in rows) == LENGTH
    assert [row.memory_bytes for row in rows] == list(choice.schedule.memory)
    # What devices compute adds up to what a step takes each by itself.
    work, devices = choice.model.work, choice.model.devices
    flops = sum(
        (row.attention_seconds + row.other_seconds) * devices.flops[number]
        for row, number in zip(rows, choice.schedule.split.devices, strict=True)
    )
    np.testing.assert_allclose(flops, work_flops(work))
    systems = {row.system: row.seconds for row in report.systems}
    assert list(systems) == ["hexiseq", "ring", "ulysses", "usp"]
    assert systems["usp"] is None
    assert all(report.seconds <= s for s in systems.values() if s is not None)


def test_layers_are_made_again_only_where_memory_is_short(problems: dict[str, PlanningProblem]):
    problem = problems["hetjax's GPT"]
    choice = HexiSeqPlanner().choose(problem)
    assert not choice.model.work.is_recomputed
    # A little less than what is needed to keep all.
    limit = max(choice.schedule.memory) * 0.93 / 0.9
    parts = [
        replace(part, kind=replace(part.kind, memory_bytes=int(limit)))
        for part in problem.cluster.subclusters
    ]
    short = replace(problem, cluster=replace(problem.cluster, subclusters=tuple(parts)))
    again = HexiSeqPlanner().choose(short)
    assert again.model.work.is_recomputed or again.schedule.split != choice.schedule.split
    tiny = [replace(part, kind=replace(part.kind, memory_bytes=10**5)) for part in parts]
    none = replace(problem, cluster=replace(problem.cluster, subclusters=tuple(tiny)))
    with pytest.raises(DoesNotFitError, match=r"host-\d\[0\] needs .*B of 90 kB .*of parameters"):
        HexiSeqPlanner().choose(none)


def test_state_waits_with_the_hosts_where_devices_have_no_room(
    problems: dict[str, PlanningProblem],
):
    problem = replace(problems["hetjax's GPT"], optimizer_bytes=8.0)

    def planned(memory: float, host_memory: int | None = None) -> Plan:
        parts = [
            replace(
                part,
                kind=replace(part.kind, memory_bytes=int(memory)),
                host_memory_bytes=host_memory,
            )
            for part in problem.cluster.subclusters
        ]
        cluster = replace(problem.cluster, subclusters=tuple(parts))
        return HexiSeqPlanner().plan(replace(problem, cluster=cluster))

    kept = planned(1.6e6, 10**9)
    assert not kept.stages[0].offload
    with pytest.raises(DoesNotFitError):
        planned(9e5)
    away = planned(9e5, 10**9)
    (stage,) = away.predicted.stages
    assert away.stages[0].offload == ("optimizer_state",)
    assert stage.fits
    assert stage.host_bytes > 0
    assert stage.update_groups
    with pytest.raises(DoesNotFitError):
        planned(9e5, 10**3)
    # Where layers could be made again instead, the faster of both.
    again, other = planned(1e6), planned(1e6, 10**9)
    assert again.stages[0].recompute_layers
    assert other.stages[0].offload == ("optimizer_state",)
    assert kept.predicted.step_time < other.predicted.step_time < again.predicted.step_time


def stated(attend: Callable[[Any], Any], **options: Any) -> PlanningProblem:
    """A model of one layer on eight tokens: what is between tokens is as given."""
    weight = np.ones((8, 8), np.float32)

    def loss(weight: Any, x: Any) -> jax.Array:
        return jnp.mean(attend((x @ weight).reshape(2, 8, 2, 4)) ** 2)

    return make_problem(
        loss,
        weight,
        np.zeros((2, 8, 8), np.float32),
        cluster=unlike_cluster(),
        optimizer=optax.sgd(1e-2),
        num_microbatches=1,
        divides_sequences=True,
        **options,
    )


def attention(x: Any) -> jax.Array:
    return hetjax.attention(x, x, x, causal=True)


def capped(x: Any) -> jax.Array:
    weights = jax.nn.softmax(jnp.tanh(jnp.einsum("bthd,bshd->bhts", x, x)))
    return jnp.einsum("bhts,bshd->bthd", weights, x)


def unlike(x: Any) -> jax.Array:
    y = attention(x).reshape(2, 8, 1, 8)
    return hetjax.attention(y, y, y)


def scanned(x: Any) -> jax.Array:
    return jax.lax.scan(lambda x, _: (attention(x), None), x, None, 2)[0]


def crossing(x: Any) -> jax.Array:
    other = jnp.ones((2, 5, 2, 4), jnp.float32)
    return hetjax.attention(x, other, other)


def remembering(x: Any) -> jax.Array:
    memory = jnp.ones((5, 4), jnp.float32)
    return jax.nn.softmax(x @ memory.T) @ memory


REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "cross attention": (
        crossing,
        "loss: the attention at FILE:LINE is not of a sequence to",
    ),
    "a memory alone": (remembering, "loss: it has no attention whose context members could share"),
    "no attention": (lambda x: x, "loss: it has no attention whose context members could share"),
    "unknown attention": (capped, "dot_general at FILE:LINE: tanh is between the scores and the"),
    "unlike heads": (unlike, "query_heads of the attention at FILE:LINE is 1, and 2 of the one at"),
    "scan": (scanned, "stands in a scan at FILE:LINE that is one step"),
    "cumulative sum": (lambda x: jnp.cumsum(attention(x), 1), "cumsum at FILE:LINE goes along"),
    "flip": (lambda x: attention(x)[:, ::-1] + x, "rev at FILE:LINE goes along"),
    "shift": (lambda x: jnp.roll(attention(x), 1, 1), "slice at FILE:LINE goes along"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_shared_is_refused_by_name_and_line(name: str):
    function, message = REFUSED[name]
    pattern = re.escape(message).replace("FILE", re.escape(__file__)).replace("LINE", r"\d+")
    with pytest.raises(InputError, match=pattern):
        HexiSeqPlanner().plan(stated(function))


def test_a_convolution_along_the_sequence_is_refused():
    kernel = jnp.ones((3, 8, 8), jnp.float32)

    def convolved(x: Any) -> jax.Array:
        dimensions = ("NWC", "WIO", "NWC")
        y = attention(x).reshape(2, 8, 8)
        return jax.lax.conv_general_dilated(y, kernel, (1,), "SAME", dimension_numbers=dimensions)

    with pytest.raises(InputError, match=r"conv_general_dilated at .* goes along"):
        HexiSeqPlanner().plan(stated(convolved))
