"""Plans for the same Llama, its blocks scanned over and one after another.

What the steps of both take is predicted. A planner should find the same for a model, however its
author writes a loop.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from hetjax.models import LlamaConfig, language_model, recipe
from hetjax.planner import Plan, PlanOptions, make_problem, solve

CONFIGS = Path(__file__).parent.parent / "configs"


class Case(NamedTuple):
    """A model on a cluster.

    Args:
        model: its name.
        config: its shape.
        cluster: the cluster's file.
        optimizer: the optimizer's name.
        batch_size: sequences in a step.
        microbatches: microbatches in it.
    """

    model: str
    config: LlamaConfig
    cluster: str
    optimizer: str
    batch_size: int
    microbatches: int


def _llama_1b(dtype: str) -> LlamaConfig:
    return LlamaConfig(32000, 22, 2048, 32, 4, 5632, 2048, compute_dtype=dtype)


def cases() -> tuple[Case, ...]:
    """Models that fit easily, and such as have to make layers again."""
    laboratory, harp = "clusters/home_laboratory.yaml", "papers/harp/fig7b.yaml"
    llama_7b = recipe("llama-7b", vocabulary=32000, sequence=2048)
    assert isinstance(llama_7b, LlamaConfig)
    half = dataclasses.replace(llama_7b, compute_dtype="float16")
    return (
        Case("llama 1.1B", _llama_1b("bfloat16"), laboratory, "adamw", 32, 32),
        Case("llama 1.1B", _llama_1b("bfloat16"), laboratory, "adamw", 64, 16),
        Case("llama 7B", llama_7b, laboratory, "sgd", 32, 32),
        Case("llama 1.1B", _llama_1b("float16"), harp, "adamw", 256, 32),
        Case("llama 7B", half, harp, "adamw", 256, 64),
    )


def plan_of(case: Case, *, scanned: bool) -> Plan:
    """The plan of a case."""
    model = language_model(dataclasses.replace(case.config, scan_blocks=scanned))
    tokens = jax.ShapeDtypeStruct((case.batch_size, case.config.sequence + 1), jnp.int32)
    problem = make_problem(
        model.loss,
        model.parameter_shapes,
        {"tokens": tokens},
        cluster=CONFIGS / case.cluster,
        optimizer=getattr(optax, case.optimizer)(1e-3),
        num_microbatches=case.microbatches,
        options=PlanOptions(),
    )
    return solve(problem)


def scanned_rows() -> Iterator[dict[str, Any]]:
    """The step times of both plans, and what one is of the other."""
    for case in cases():
        row: dict[str, Any] = {
            "model": case.model,
            "cluster": Path(case.cluster).stem,
            "optimizer": case.optimizer,
            "microbatches": case.microbatches,
        }
        for name, scanned in (("unscanned", False), ("scanned", True)):
            plan = plan_of(case, scanned=scanned)
            row[name] = plan.predicted.step_time
            row[f"{name}_stages"] = [
                [list(s.layers), str(s.submesh), s.sharding_text, s.repeats] for s in plan.stages
            ]
        yield row | {"scanned_over_unscanned": row["scanned"] / row["unscanned"]}
