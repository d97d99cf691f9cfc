"""`hetjax.linear_cross_entropy` beside dense logits: time and memory by tokens and vocabulary."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from context_kernel import measured

import hetjax
from hetjax.pipeline.program.temporaries import temporary_bytes
from hetjax.pipeline.update.alike_leaves import program_of

TOKENS, VOCABULARIES, WIDTH = (1024, 4096), (8192, 32768), 256
CHUNKS = (256, 1024)


def _dense(hidden: Any, weights: Any, labels: Any) -> Any:
    logits = jnp.einsum("btd,vd->btv", hidden, weights, preferred_element_type=jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


def _chunked(chunk: int) -> Callable[..., Any]:
    return lambda *arrays: hetjax.linear_cross_entropy(*arrays, chunk=chunk)


def _mean(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arrays: jnp.mean(function(*arrays))


def _both(function: Callable[..., Any]) -> Callable[..., Any]:
    return jax.value_and_grad(_mean(function), argnums=(0, 1))


PASSES = {"forward": _mean, "forward and backward": _both}


def logit_rows(
    tokens: Sequence[int], vocabularies: Sequence[int], rounds: int
) -> Iterator[dict[str, Any]]:
    """A row for each number of tokens, vocabulary and pass.

    Args:
        tokens: numbers of tokens, of one example.
        vocabularies: sizes of the vocabulary.
        rounds: in how many rounds each is timed.

    Yields:
        Of dense logits and of each chunk: medians of processor seconds and of seconds, peak bytes
        beside arguments and results, and of these what is predicted; what of each the chunks have
        in parts of the dense ones; and the largest difference of losses and gradients.
    """
    systems = {"dense": _dense} | {f"chunks of {n}": _chunked(n) for n in CHUNKS}
    for count, vocabulary in itertools.product(tokens, vocabularies):
        arrays = _arrays(count, vocabulary)
        for name, passes in PASSES.items():
            functions = {system: passes(each) for system, each in systems.items()}
            yield {
                "tokens": count,
                "vocabulary": vocabulary,
                "width": WIDTH,
                "pass": name,
            } | _row(functions, arrays, rounds)


def _arrays(tokens: int, vocabulary: int) -> list[jax.Array]:
    rng = np.random.default_rng(0)
    return [
        jnp.asarray(rng.normal(size=(1, tokens, WIDTH)), jnp.float32),
        jnp.asarray(rng.normal(size=(vocabulary, WIDTH)) / WIDTH**0.5, jnp.float32),
        jnp.asarray(rng.integers(0, vocabulary, (1, tokens)), jnp.int32),
    ]


def _row(
    functions: dict[str, Callable[..., Any]], arrays: Sequence[Any], rounds: int
) -> dict[str, Any]:
    compiled: dict[str, Any] = {
        s: jax.jit(each).lower(*arrays).compile() for s, each in functions.items()
    }
    exact = compiled["dense"](*arrays)
    difference = max(_difference(each(*arrays), exact) for each in compiled.values())
    times, row = measured(compiled, arrays, rounds)
    peak = row["peak_bytes"]
    chunked = [system for system in compiled if system != "dense"]
    return row | {
        "predicted_bytes": {s: _predicted(each, arrays) for s, each in functions.items()},
        "time_ratio": {
            s: median(a / b for a, b in zip(times[s], times["dense"], strict=True)) for s in chunked
        },
        "memory_ratio": {system: peak[system] / peak["dense"] for system in chunked},
        "largest_difference": difference,
    }


def _difference(found: Any, exact: Any) -> float:
    """The largest difference of arrays, in parts of the largest number of each."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(exact), strict=True)
    return max(float(jnp.max(jnp.abs(a - b)) / jnp.max(jnp.abs(b))) for a, b in pairs)


def _predicted(function: Callable[..., Any], arrays: Sequence[Any]) -> int:
    shapes = [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in arrays]
    program, _ = program_of(lambda given: jax.tree.leaves(function(*given)), [shapes])
    return temporary_bytes(program)
