"""What HexiSeq's scheduler takes and finds: large clusters, and few devices beside all splits.

`scheduler` has the cluster of simulation 3 with up to eight times as many nodes, by both cost
models. Its rows: `gpus`, `seconds` of a search (the median), `cost` of its step in seconds, and
`best_baseline_cost` of ring attention, Ulysses and USP at their best settings by the same model;
`published_seconds` are the paper's (figure 6).

`exhaustive` draws small cases and costs every split of them. Its rows: `devices`, `tokens`,
`heads`, how many `splits` were costed, and `worst`, by how many times the scheduler's is slower
than the best of all, at most.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from statistics import median
from typing import Any

from context_exhaustive import best_of_all, small_case
from context_simulations import COSTS, EFFICIENCY, MODELS, SEQUENCES, simulated
from threadpoolctl import threadpool_limits

from hetjax.planner.hexiseq.context_devices import ContextDevices
from hetjax.planner.hexiseq.context_work import transformer_work
from hetjax.planner.hexiseq.scheduler import schedule_context, schedule_even

PUBLISHED_SECONDS = {128: 9.0, 1024: 444.0}

LENGTH = 2**18

SMALL = ((3, 8, 4), (4, 6, 4), (5, 6, 3), (6, 5, 2))
"""Devices, tokens and query heads of small cases."""


def scheduler_rows(rounds: int) -> Iterator[dict[str, Any]]:
    """A row for each size of the cluster, model and cost model."""
    for times in (1, 2, 4, 8):
        devices = ContextDevices(simulated(3, times), efficiency=EFFICIENCY)
        for name, shape in MODELS.items():
            work = transformer_work(LENGTH * times, sequences=SEQUENCES, **shape)
            for costs, make in COSTS.items():
                model = make(devices, work)
                seconds, cpu_seconds = [], []
                found = schedule_context(model)  # Warm, so that imports do not count.
                with threadpool_limits(1):
                    for _ in range(rounds):
                        began, cpu_began = time.perf_counter(), time.process_time()
                        found = schedule_context(model)
                        seconds.append(time.perf_counter() - began)
                        cpu_seconds.append(time.process_time() - cpu_began)
                yield {
                    "gpus": devices.num_devices,
                    "model": name,
                    "costs": costs,
                    "length": work.length,
                    "seconds": median(seconds),
                    "cpu_seconds": median(cpu_seconds),
                    "published_seconds": PUBLISHED_SECONDS.get(devices.num_devices),
                    "cost": found.seconds,
                    "best_baseline_cost": schedule_even(model).seconds,
                }


def exhaustive_rows(cases: int) -> Iterator[dict[str, Any]]:
    """A row for each size and cost model."""
    for num_devices, length, heads in SMALL:
        for costs, make in COSTS.items():
            ratios, splits, seconds = [], 0, 0.0
            for number in range(cases):
                model = make(*small_case(number, num_devices, length, heads))
                best, count = best_of_all(model)
                began = time.perf_counter()
                ratios.append(schedule_context(model).seconds / best)
                seconds = max(seconds, time.perf_counter() - began)
                splits += count
            yield {
                "devices": num_devices,
                "tokens": length,
                "heads": heads,
                "costs": costs,
                "cases": cases,
                "splits": splits,
                "worst": max(ratios),
                "most_seconds": seconds,
            }
