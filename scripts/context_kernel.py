"""`hetjax.attention` beside `jax.nn.dot_product_attention`: time and memory by length."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any

import jax
from benchmarking import take_turns

import hetjax

LENGTHS = (256, 512, 1024, 2048, 4096, 8192)
TOKENS = 1024
"""Tokens of all examples together, as long as one is no longer than that."""

HEADS, GROUPS, SIZE = 4, 2, 64


def _plain(q: Any, k: Any, v: Any) -> Any:
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


def _ours(q: Any, k: Any, v: Any) -> Any:
    return hetjax.attention(q, k, v, causal=True)


SYSTEMS: dict[str, Callable[..., Any]] = {"hetjax": _ours, "jax.nn": _plain}


def _forward(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda q, k, v, d_out: function(q, k, v)


def _both(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(q: Any, k: Any, v: Any, d_out: Any) -> Any:
        out, back = jax.vjp(function, q, k, v)
        return (out, *back(d_out))

    return run


PASSES = {"forward": _forward, "forward and backward": _both}


def kernel_rows(lengths: Sequence[int], rounds: int) -> Iterator[dict[str, Any]]:
    """A row for each length and pass.

    Args:
        lengths: lengths of sequences.
        rounds: in how many rounds each is timed.

    Yields:
        Medians of processor seconds and of seconds, peak bytes beside arguments and results, and
        what of each hetjax has in parts of JAX's.
    """
    for length in lengths:
        examples = max(1, TOKENS // length)
        arrays = [
            jax.random.normal(jax.random.key(seed), (examples, length, heads, SIZE))
            for seed, heads in enumerate((HEADS, GROUPS, GROUPS, HEADS))
        ]
        for name, passes in PASSES.items():
            compiled = {
                system: jax.jit(passes(function)).lower(*arrays).compile()
                for system, function in SYSTEMS.items()
            }
            yield {"length": length, "examples": examples, "pass": name} | _row(
                compiled, arrays, rounds
            )


def _row(compiled: dict[str, Any], arrays: Sequence[Any], rounds: int) -> dict[str, Any]:
    times, row = measured(compiled, arrays, rounds)
    peak = row["peak_bytes"]
    return row | {
        "time_ratio": median(
            ours / theirs for ours, theirs in zip(times["hetjax"], times["jax.nn"], strict=True)
        ),
        "memory_ratio": peak["hetjax"] / peak["jax.nn"],
    }


def measured(
    compiled: dict[str, Any], arrays: Sequence[Any], rounds: int
) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """What compiled programs take of the same arrays, in turn.

    Args:
        compiled: the programs, by system.
        arrays: their operands.
        rounds: in how many rounds each is timed.

    Returns:
        Processor seconds of all rounds, by system; and a row of their medians, of those of the
        clock, and of the peak bytes beside arguments and results.
    """
    wall: dict[str, list[float]] = {system: [] for system in compiled}

    def step(system: str) -> float:
        began, processor = time.perf_counter(), time.process_time()
        jax.block_until_ready(compiled[system](*arrays))
        wall[system].append(time.perf_counter() - began)
        return time.process_time() - processor

    turns = {system: (lambda system=system: step(system)) for system in compiled}
    times = take_turns(turns, rounds=rounds, steps=1)
    return times, {
        "processor_seconds": {system: median(each) for system, each in times.items()},
        "seconds": {system: median(each) for system, each in wall.items()},
        "peak_bytes": {
            system: each.memory_analysis().temp_size_in_bytes for system, each in compiled.items()
        },
    }


def shown(row: dict[str, Any]) -> str:
    """A row as a line."""
    seconds, peak = row["processor_seconds"], row["peak_bytes"]
    return (
        f"length {row['length']:5}, {row['pass']:20}: "
        f"hetjax {1e3 * seconds['hetjax']:8.1f} ms {peak['hetjax'] / 1e6:7.1f} MB, "
        f"jax.nn {1e3 * seconds['jax.nn']:8.1f} ms {peak['jax.nn'] / 1e6:7.1f} MB, "
        f"ratios {row['time_ratio']:.2f} {row['memory_ratio']:.2f}"
    )
