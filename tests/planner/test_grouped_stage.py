"""Stages whose blocks are differentiated once: the same work as where all are traced."""

from __future__ import annotations

from typing import Any

import jax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import BLOCKS, Model, make_batch

from hetjax.models import GPTConfig, LlamaConfig, language_model
from hetjax.pipeline.layers.cost_layers import crossing_bytes
from hetjax.pipeline.layers.modules import find_modules
from hetjax.pipeline.program.traced_program import Program
from hetjax.pipeline.program.tracing import trace
from hetjax.planner.problem.problem import groups_of
from hetjax.planner.work.grouped_stage import Groups
from hetjax.planner.work.stage_work import Known, measure


def check_grouped(program: Program, boundaries: list[int], groups: Groups) -> None:
    for options in ({}, {"recompute": [True] * (len(boundaries) - 1)}):
        given: Any = {**options, "split": True}
        grouped = measure(program, boundaries, known=Known(groups=groups), **given)
        assert grouped == measure(program, boundaries, **given)


def modules_of(program: Program) -> Groups:
    return groups_of(program, find_modules(program, crossing_bytes(program)))


SHAPE: Any = {"vocabulary": 64, "blocks": 6, "width": 32, "heads": 2, "sequence": 16}


@pytest.mark.parametrize(
    "config",
    [
        GPTConfig(**SHAPE, compute_dtype="bfloat16"),
        LlamaConfig(**SHAPE, key_value_heads=2, ffn_width=64, compute_dtype="bfloat16"),
    ],
)
def test_blocks_that_are_differentiated_once_work_as_much(config: Any):
    model = language_model(config)
    parameters = jax.eval_shape(model.init, jax.random.key(0))
    program = trace(model.loss, parameters, model.batch_shapes(4))
    groups, end = modules_of(program), program.num_positions
    for boundaries in ([0, end], [0, end // 3, 2 * end // 3, end]):
        check_grouped(program, boundaries, groups)


@settings(max_examples=15)
@given(
    blocks=st.lists(st.sampled_from(sorted(BLOCKS)), min_size=1, max_size=3),
    repeated=st.integers(1, 2),
    tied=st.booleans(),
    counted=st.booleans(),
    data=st.data(),
)
def test_any_groups_of_any_model_work_as_much(
    blocks: list[str], repeated: int, tied: bool, counted: bool, data: st.DataObject
):
    model = Model(tuple(blocks * repeated), tied, counted)
    program = trace(model.loss, jax.eval_shape(model.init), make_batch(4))
    end = program.num_positions
    inside = st.sets(st.integers(1, end - 1), max_size=3)
    edges = sorted({0, *data.draw(st.sets(st.integers(1, end - 1), max_size=8))})
    boundaries = sorted({0, *data.draw(inside), end})
    check_grouped(program, boundaries, Groups(program, edges))


def test_a_deep_stage_is_traced_no_longer_than_a_shallow_one(monkeypatch: pytest.MonkeyPatch):
    """Every step of every block is bound once where it is differentiated, were nothing grouped."""
    from hetjax import _compat

    bound: list[str] = []
    bind = _compat.bind

    def counting(equation: Any, operands: Any) -> Any:
        bound.append(equation.primitive.name)
        return bind(equation, operands)

    counts = []
    for blocks in (4, 12):
        model = language_model(GPTConfig(**{**SHAPE, "blocks": blocks}))
        parameters = jax.eval_shape(model.init, jax.random.key(0))
        program = trace(model.loss, parameters, model.batch_shapes(4))
        monkeypatch.setattr(_compat, "bind", counting)
        bound.clear()
        measure(program, [0, program.num_positions], known=Known(groups=modules_of(program)))
        counts.append(len(bound))
        monkeypatch.setattr(_compat, "bind", bind)
    assert counts[1] <= counts[0]
