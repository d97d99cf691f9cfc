"""Records of traces: alike in every process for the same program, and unlike for any other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from ray_jobs import SIZE, Tokens, loss, parameters

from hetjax.pipeline.program.trace_record import (
    TraceRecord,
    described,
    flat_program,
    record_of,
    record_of_program,
)
from hetjax.pipeline.program.traced_program import FlatJaxpr, flatten_jaxpr
from hetjax.pipeline.program.tracing import trace
from hetjax.pipeline.update.traced_update import trace_update
from hetjax.sharding import HSharding, Subgroup
from hetjax.sharding.deduction.reshard import reshard


def flat(function: Any, *operands: Any) -> FlatJaxpr:
    return flatten_jaxpr(jax.make_jaxpr(function)(*operands))


def record(function: Any, *operands: Any) -> TraceRecord:
    return record_of(flat(function, *operands))


def digests() -> list[list[str]]:
    """Of a loss with a scan, and of an optimizer's update with a branch."""
    shapes = jax.eval_shape(parameters)
    leaves, tree = jax.tree.flatten(shapes)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    update = trace_update(optimizer, leaves, lambda values: jax.tree.unflatten(tree, values))
    program = trace(loss, shapes, jax.eval_shape(lambda: Tokens().batch(0, SIZE)))
    records = record_of_program(program), record_of(update)
    return [[repr(entry) for entry in each.entries] for each in records]


def test_another_process_has_the_same_record():
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, (Path(__file__).parents[1], *sys.path)))
    code = (
        "import json, sys; sys.path.insert(0, sys.argv[1]); import conftest, test_trace_record; "
        "print(json.dumps(test_trace_record.digests()))"
    )
    printed = subprocess.run(
        [sys.executable, "-c", code, str(Path(__file__).parent)],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(printed.stdout.splitlines()[-1]) == digests()


TABLE = np.linspace(0.0, 6.0, 512, dtype=np.float32)
X = jnp.ones(512)


def scanned(scale: float) -> Any:
    return lambda x: jax.lax.scan(lambda c, _: (c * scale, None), x, None, length=3)[0]


@jax.custom_jvp
def bent(x: Any, by: Any) -> Any:
    return jnp.sin(x) * by


bent.defjvp(lambda primals, tangents: (bent(*primals), tangents[0]))

UNLIKE = {
    "a literal": [lambda x: x * 2.0, lambda x: x * 3.0],
    "a literal in a loop": [scanned(2.0), scanned(3.0)],
    "an array": [lambda x: x * TABLE, lambda x: x * np.roll(TABLE, 1)],
    "one of many numbers": [
        lambda x: x + np.zeros(512, np.float32),
        lambda x: x + np.eye(1, 512, 9, dtype=np.float32)[0],
    ],
    "a mask": [lambda x: jnp.where(TABLE > 1, x, 0), lambda x: jnp.where(TABLE > 2, x, 0)],
    "where numbers are infinite": [
        lambda x: x + np.where(TABLE > 1, np.float32(np.inf), TABLE),
        lambda x: x + np.where(TABLE > 2, np.float32(np.inf), TABLE),
    ],
    "a parameter": [lambda x: jnp.cumsum(x), lambda x: jnp.cumsum(x[::-1])],
    "wiring": [lambda x: (x + 1) - (x * 2), lambda x: (x * 2) - (x + 1)],
    "a random key": [
        lambda x: x * jax.random.uniform(jax.random.key(0)),
        lambda x: x * jax.random.uniform(jax.random.key(1)),
    ],
    "what has a derivative of its own": [lambda x: bent(x, 1.0), lambda x: bent(x, 2.0)],
    "a longer one": [lambda x: x + 1, lambda x: jnp.sin(x + 1)],
}


@pytest.mark.parametrize("functions", UNLIKE.values(), ids=UNLIKE.keys())
def test_another_program_has_another_record(functions: list[Any]):
    one, other = (record(function, X) for function in functions)
    again = record(functions[0], X)
    assert again == one
    assert not one.differences(again)
    assert one.differences(other)
    assert other.differences(one)


def test_constants_may_differ_as_devices_round_them():
    noise = 1 + 1e-6 * np.random.default_rng(0).normal(size=512).astype(np.float32)
    table = jnp.sin(1000 * TABLE)
    one, other = (record(lambda x, t=each: x * t, X) for each in (table, table * noise))
    assert one != other
    assert not one.differences(other)


def test_the_first_difference_is_told_with_its_line():
    def scaled(scale: float) -> Any:
        return lambda w, batch: jnp.mean((batch["x"] @ w * scale) ** 2)

    batch = {"x": jnp.ones((4, 2))}
    one, other = (trace(scaled(scale), jnp.ones((2, 3)), batch) for scale in (3.0, 1.0))
    record = record_of_program(one)
    place, *_ = record.differences(record_of_program(other))
    assert described(flat_program(other), place).startswith(f"'mul' at {__file__}:")
    difference = record.difference(record_of_program(other), place)
    assert difference == "its constant float32[] has other numbers: 3.0 and 1.0"


def resharded_twice(number_of_traces: int) -> TraceRecord:
    """Of a function with two reshards, after others were traced."""
    halves = HSharding((Subgroup((0,), (), P()), Subgroup((1,), (), P())), hdim=0)
    for _ in range(number_of_traces):
        jax.make_jaxpr(lambda x: reshard(x, halves))(np.ones(4))
    return record(jax.grad(lambda x: jnp.sum(reshard(reshard(x, halves) * x, halves))), np.ones(4))


def test_reshards_are_told_apart_by_their_order():
    assert resharded_twice(0).differences(resharded_twice(3)) == []
