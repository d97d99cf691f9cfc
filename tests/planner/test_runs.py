"""All runs of layers at once: what they keep is what they keep when each is measured whole."""

from __future__ import annotations

import itertools

import jax
import pytest

from hetjax.models import GPTConfig, language_model
from hetjax.pipeline.layers.structural_layers import structural_layers
from hetjax.pipeline.program.tracing import trace
from hetjax.planner.work.layer_runs import all_runs
from hetjax.planner.work.stage_work import Known, measure, measure_layers


def test_what_neighbouring_layers_both_keep_counts_once():
    config = GPTConfig(vocabulary=64, blocks=3, width=32, heads=2, sequence=16)
    model = language_model(config)
    parameters = jax.eval_shape(model.init, jax.random.key(0))
    program = trace(model.loss, parameters, model.batch_shapes(2))
    layers = structural_layers(program).positions
    known = Known()
    works = measure_layers(program, layers, known)
    kept = all_runs(program, works).residual_bytes
    assert any(work.kept_twice for work in works)
    for first, end in itertools.combinations(range(len(layers)), 2):
        edges = sorted({0, layers[first], layers[end], layers[-1]})
        whole = measure(program, edges, known=known)[edges.index(layers[first])]
        # Of three layers or more some value may skip the one between.
        assert kept[first, end] == pytest.approx(whole.residual_bytes, rel=0.02), (first, end)
