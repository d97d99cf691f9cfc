"""How near the planner comes to the best plan, on random cases small enough to try every plan.

Every case is a random model on a random small cluster. Every pipeline of it is enumerated: each
division of the layers, each choice and order of submeshes, each way to run each stage, each warm-up
count that the schedule has at some pace. All are timed by the clock that the search judges by: how
near the search comes to the best is measured, not how true the clock is.

python scripts/check_best.py
python scripts/check_best.py --cases 400 --json
python scripts/check_best.py --objective cost
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from hetjax import planner
from hetjax.mesh import Cluster, DeviceKind, Link, Subcluster
from hetjax.pipeline.schedules.warm_up import h_1f1b_counts
from hetjax.planner.harp.candidate_clock import CandidateClock
from hetjax.planner.harp.cost_search import rented_nodes
from hetjax.planner.harp.fixed_pace import Place
from hetjax.planner.harp.search import Candidate, transfers_between
from hetjax.planner.harp.stage_table import StageTable
from hetjax.planner.harp.table_making import make_stage_table
from hetjax.planner.plan.prices import node_prices, price_of_nodes
from hetjax.planner.work.layer_runs import all_runs

MOST = 100_000
"""Cases with more divisions of layers and devices than this are drawn again."""


def random_problem(rng: Random, objective: str) -> planner.PlanningProblem:
    """A random chain of layers, sometimes with a tied table, on a random small cluster."""
    widths = [rng.choice([128, 256, 512, 1024]) for _ in range(rng.randint(3, 7))]
    tied = rng.random() < 0.3
    if tied:
        widths.append(widths[0])
    repeats = [rng.choice([0, 0, 1, 2]) for _ in widths[1:]]
    shape = jax.ShapeDtypeStruct
    weights = {
        "in": shape((rng.choice([256, 2048, 8192]), widths[0]), jnp.float32),
        "chain": [shape(pair, jnp.float32) for pair in itertools.pairwise(widths)],
        "square": [
            [shape((width, width), jnp.float32)] * count
            for width, count in zip(widths[1:], repeats, strict=True)
        ],
    }

    def loss(weights: Any, x: jax.Array) -> jax.Array:
        y = x @ weights["in"]
        for weight, squares in zip(weights["chain"], weights["square"], strict=True):
            y = jnp.tanh(y @ weight)
            for square in squares:
                y = jnp.tanh(y @ square)
        return jnp.mean((y @ weights["in"].T - x) ** 2) if tied else jnp.mean(y**2)

    num_microbatches = rng.randint(2, 12)
    size, rows = rng.choice([1, 2, 4, 8]), rng.choice([16, 64, 256])
    batch = shape((num_microbatches * size, rows, weights["in"].shape[0]), jnp.float32)
    optimizer = rng.choice([optax.sgd(1e-3), optax.adam(1e-3)])
    return planner.make_problem(
        loss,
        weights,
        batch,
        cluster=random_cluster(rng, priced=objective == "cost"),
        optimizer=optimizer,
        num_microbatches=num_microbatches,
        options=planner.PlanOptions(
            num_layers=rng.randint(3, 8),
            schedule=rng.choice(["h_1f1b", "h_1f1b", "1f1b"]),
            objective=objective,
            # Every plan is made here of stages of one member.
            union_stages=False,
        ),
    )


def random_cluster(rng: Random, priced: bool) -> Cluster:
    """One to three subclusters of up to four devices, with links of any speed."""
    shapes = rng.choice(
        [
            [(1, 1), (1, 2)],
            [(1, 2), (1, 2)],
            [(1, 1), (1, 1), (1, 1)],
            [(1, 1), (1, 1), (1, 2)],
            [(2, 1), (1, 2)],
            [(2, 2)],
            [(1, 4)],
            [(1, 4), (1, 2)],
            [(2, 2), (1, 1)],
            [(3, 1), (1, 2)],
        ]
    )
    memory, speed = rng.choice([2e7, 5e7, 2e8, 1e10]), 10 ** rng.uniform(11, 13)
    subclusters = []
    for place, (nodes, devices) in enumerate(shapes):
        flops, bandwidth = speed * rng.uniform(1, 5), 10 ** rng.uniform(10, 12)
        kind = DeviceKind(
            f"card {place}",
            {"float32": flops},
            int(memory * rng.choice([1, 1, 2])),
            bandwidth,
            source="made up",
        )
        near, far = random_link(rng, 9, 11), random_link(rng, 8, 10)
        # About as dear as fast, so that it is not one kind that is rented always.
        price = flops / 1e12 * rng.uniform(0.7, 1.4) if priced else None
        subclusters.append(
            Subcluster(f"part{place}", kind, nodes, devices, near, far, price_per_device_hour=price)
        )
    names = [each.name for each in subclusters]
    links = tuple((a, b, random_link(rng, 8, 10)) for a, b in itertools.combinations(names, 2))
    return Cluster("random", tuple(subclusters), links)


def random_link(rng: Random, least: float, most: float) -> Link:
    """A link whose bandwidth is between powers of ten."""
    return Link(10 ** rng.uniform(least, most), rng.choice([1e-6, 1e-5, 1e-4]))


def placements(table: StageTable) -> Iterator[tuple[Place, ...]]:
    """Every division of the layers on every order of submeshes, with devices in order."""

    def behind(places: tuple[Place, ...], passed: tuple[int, ...]) -> Iterator[tuple[Place, ...]]:
        first = places[-1].layers[1] if places else 0
        if first == table.num_layers:
            yield places
            return
        for subcluster, (nodes, per_node) in enumerate(table.nodes):
            if subcluster in passed[:-1]:
                continue
            free = 0
            if passed and subcluster == passed[-1]:
                last = places[-1]
                free = last.start + table.slices[subcluster][last.slice].num_devices
            then = passed if subcluster in passed else (*passed, subcluster)
            for chosen, cut in enumerate(table.slices[subcluster]):
                for start in range(free, nodes * per_node - cut.num_devices + 1):
                    in_node = start % per_node + cut.num_devices <= per_node
                    if in_node or (cut.shape[1] == per_node and start % per_node == 0):
                        for end in range(first + 1, table.num_layers + 1):
                            place = Place((first, end), subcluster, chosen, start)
                            yield from behind((*places, place), then)

    return behind((), ())


def candidates(table: StageTable, places: tuple[Place, ...], bound: float) -> Iterator[Candidate]:
    """Every way to run a placement whose slowest stage or link would not alone take the bound."""
    crossed = [
        (float(t.forward[b.layers[0]]), float(t.backward[b.layers[0]]))
        for a, b in itertools.pairwise(places)
        for t in [transfers_between(table, a, b)]
    ]
    most = bound / table.num_microbatches
    slowest = max((max(pair) for pair in crossed), default=0.0)
    if slowest > most:
        return
    cuts = [table.slices[place.subcluster][place.slice] for place in places]
    cells = [
        [
            (option, float(seconds), int(limit))
            for option, (seconds, limit) in enumerate(
                zip(cut.seconds_of(p.layers), cut.limits_of(p.layers), strict=True)
            )
            if seconds <= most and limit
        ]
        for cut, p in zip(cuts, places, strict=True)
    ]
    means = [sum(pair) / 2 for pair in crossed]
    for chosen in itertools.product(*cells):
        pace = max(slowest, *(seconds for _, seconds, _ in chosen))
        tried = set()
        for at in (pace, *(each for m in means for each in (2 * m, 10 * m * (1 + 1e-12)))):
            counts = counts_of(table, means, at)
            if at < pace or counts in tried:
                continue
            tried.add(counts)
            if all(limit >= n for n, (_, _, limit) in zip(counts, chosen, strict=True)):
                options = tuple(option for option, _, _ in chosen)
                yield Candidate(places, options, counts, 0.0, at, 0.0)


def counts_of(table: StageTable, means: Sequence[float], pace: float) -> tuple[int, ...]:
    """The warm-up counts of the schedule at a pace."""
    stages = len(means) + 1
    if table.schedule == "1f1b":
        counts = list(range(stages, 0, -1))
    else:
        assert table.schedule == "h_1f1b", table.schedule
        counts = list(h_1f1b_counts([pace] * stages, means))
    return tuple(min(count, table.num_microbatches) for count in counts)


def best_of_all(problem: planner.PlanningProblem) -> tuple[float, int] | None:
    """The least of the objective over every pipeline there is, and how many were timed."""
    runs = all_runs(problem.program, problem.works)
    table = make_stage_table(problem, runs)
    every = list(itertools.islice(placements(table), MOST + 1))
    if len(every) > MOST:
        return None
    clock = CandidateClock.of(problem, runs, table)
    prices = node_prices(problem.cluster) if problem.options.objective == "cost" else None
    best, timed = float("inf"), 0
    for places in every:
        rate = 1.0
        if prices is not None:
            somehow = Candidate(places, (), (), 0.0, 0.0, 0.0)
            rate = price_of_nodes(prices, rented_nodes(table, somehow))
        for candidate in candidates(table, places, best / rate):
            timed += 1
            best = min(best, rate * clock.seconds(candidate))
    return best, timed


def draw(seed: int, objective: str) -> tuple[planner.PlanningProblem, float, int]:
    """A case that has a plan and not too many, its best score, and how many were timed."""
    for attempt in itertools.count():
        problem = random_problem(Random(f"{seed} {attempt}"), objective)
        best = best_of_all(problem)
        if best is not None and np.isfinite(best[0]):
            return problem, *best
    raise AssertionError("attempts are without an end")


def check(seed: int, objective: str) -> dict[str, Any]:
    """One case: what the planner finds, beside the best."""
    problem, best, timed = draw(seed, objective)
    began = time.process_time()
    found = planner.DynamicProgram().find(problem)
    seconds = time.process_time() - began
    assert found is not None, "there is a plan"
    return {
        "seed": seed,
        "microbatches": problem.num_microbatches,
        "devices": problem.cluster.num_devices,
        "timed": timed,
        "best": best,
        "found": found.score,
        "slower": found.score / best - 1,
        "search_seconds": seconds,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Check many cases and print shares."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", type=int, default=400)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--objective", choices=planner.OBJECTIVES, default="step_time")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    rows = []
    for seed in range(options.first, options.first + options.cases):
        rows.append(check(seed, options.objective))
        if not options.json and rows[-1]["slower"] > 1e-9:
            print(json.dumps(rows[-1]))
    slower = np.array([row["slower"] for row in rows])
    summary = {
        "cases": len(rows),
        "objective": options.objective,
        "the_best": float((slower <= 1e-9).mean()),
        "within_1_percent": float((slower <= 0.01).mean()),
        "worst_slower": float(slower.max()),
        "timed": int(sum(row["timed"] for row in rows)),
        "search_seconds": float(np.median([row["search_seconds"] for row in rows])),
    }
    print(json.dumps({**summary, "rows": rows} if options.json else summary, indent=1))


if __name__ == "__main__":
    main()
