"""HAP beside what the paper publishes, an integer program, and data parallelism.

    python scripts/bench_hap.py synthesis --json   # seconds of a search, in fresh processes
    python scripts/bench_hap.py figures --json     # predicted: the paper's cluster (figures 13, 14)
    python scripts/bench_hap.py ablation --json    # predicted: what each part of it is worth (15)
    python scripts/bench_hap.py optimal --json     # beside an integer program, and composition
    python scripts/bench_hap.py experts --json     # predicted: uneven experts beside padded ones
    python scripts/bench_hap.py lab --json         # trained: beside programs of one kind
    python scripts/bench_hap.py experts-lab --json # trained: uneven experts beside padded ones
    python scripts/bench_hap.py accuracy --json    # trained: beside what was predicted
    python scripts/bench_hap.py methods --json     # trained: gathers of uneven parts
    python scripts/bench_hap.py one-space --json   # trained: Harp's pipeline that ends in a program

`figures`, `ablation` and `experts` are predictions of section 3.2's model, for all systems alike,
with the paper's rates: FLOP/s of its two kinds of device, and the bandwidths that its code measured
of each collective between machines of 10.4 Gbit/s. It publishes no latencies: there are none here.
Every GPU is a member; what is read and written beside products takes no time, as in the paper.
What is trained is trained on hosts of the lab of unlike speed; that needs root.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from random import Random
from typing import Any

import numpy as np
from hap_lab import (
    RATES,
    accuracy_rows,
    experts_lab_rows,
    lab_rows,
    methods_rows,
    one_space_rows,
)
from hap_models import HapModel, bert, vgg19, vit
from hap_systems import DEEPSPEED

from hetjax.collecting import seldom_collected
from hetjax.pipeline.program.traced_program import Program
from hetjax.pipeline.program.tracing import trace
from hetjax.planner.hap.chain_search import ChainSearch
from hetjax.planner.hap.forced import DATA_PARALLEL
from hetjax.planner.hap.synthesis import synthesise, synthesise_at
from hetjax.planner.hap.tables import as_graph
from hetjax.planner.intra_op.integer_program import solve
from hetjax.planner.module_programs.charges import MoveOf
from hetjax.planner.module_programs.module_chain import ModuleChain, chain_of, narrow_edges
from hetjax.planner.module_programs.rates import MemberSpeed, Rates
from hetjax.planner.problem.problem import model_figures
from hetjax.planner.work.stage_traces import StageTraces

FAST, SLOW = 3.8588e12, 2.1493e12
"""FLOP/s of the paper's two kinds of device, a V100 and a P100, as its code has them."""

FASTEST = FAST * 19.5 / 15.7
"""FLOP/s of an A100, of whose float32 peak as large a share is reached as of a V100's. The paper
uses it for experts alone, and publishes no rate of it."""

_BITS = {"gather": 9.46e9, "scatter": 9.74e9, "sum": 5.91e9, "exchange": 24.6e9}
"""Bit/s of collectives on whole tensors in even shares, as its code measured them."""

_GROUPED = {"gather": 9.15e9, "scatter": 8.76e9}
"""The same by a broadcast, or a reduction, for each share."""

STATE = 8.0
"""Bytes of Adam's state for each element."""

Row = dict[str, Any]


@dataclass(frozen=True)
class PublishedNetwork:
    """The paper's collectives: padded to the largest share, or grouped, whichever is faster.

    Args:
        count: how many members.
        grouped: whether the grouped forms are known.
    """

    count: int
    grouped: bool = True

    @property
    def byte_seconds(self) -> np.ndarray:
        """For each member, what sending or receiving a byte takes."""
        return np.full(self.count, 8 / _BITS["gather"])

    def seconds(self, move: MoveOf, source: np.ndarray, target: np.ndarray) -> float:
        """What a move takes.

        Args:
            move: the move.
            source: what part each member has before.
            target: the same of afterwards.
        """
        form = "exchange" if move.form == "regroup" else move.form
        padded = 1.0 if form == "sum" else self.count * max(source.max(), target.max())
        if form == "gather":
            padded = self.count * source.max()
        if form == "scatter":
            padded = self.count * target.max()
        found = 8 * move.num_bytes * padded / _BITS[form]
        if self.grouped and form in _GROUPED:
            found = min(found, 8 * move.num_bytes / _GROUPED[form])
        return found


def published_rates(
    fast: int, slow: int, *, grouped: bool = True, fast_flops: float = FAST
) -> Rates:
    """The paper's cluster.

    Args:
        fast: how many fast devices.
        slow: how many P100.
        grouped: whether the grouped forms are known.
        fast_flops: FLOP/s of a fast one; a V100's unless given.
    """
    speeds = [fast_flops] * fast + [SLOW] * slow
    members = tuple(MemberSpeed(each, 1e30, 1e30) for each in speeds)
    return Rates(members, PublishedNetwork(len(members), grouped))


@dataclass(frozen=True, eq=False)
class Traced:
    """A model, traced and divided into modules.

    Args:
        model: the model.
        is_whole: whether it is one module.
    """

    model: HapModel
    is_whole: bool = False

    @cached_property
    def program(self) -> Program:
        """The traced loss."""
        return trace(self.model.loss, self.model.parameters, self.model.batch)

    @cached_property
    def chain(self) -> ModuleChain:
        """Its modules."""
        program = self.program
        size = program.avals[program.batch[0]].shape[0]
        sections = model_figures(program, StageTraces(program), size, None)["sections"]
        starts = [each.section.start for each in sections] or [0]
        edges = narrow_edges(program, [*starts, program.num_positions])
        return chain_of(program, [0, program.num_positions] if self.is_whole else edges)


def paper_models(gpus: int) -> list[HapModel]:
    """The paper's models for a number of GPUs, whose batch and experts grow with it."""
    return [
        vgg19(64 * gpus),
        vit(64 * gpus),
        bert(64 * gpus),
        bert(32 * gpus, experts=2 * gpus),
    ]


def _even(rates: Rates) -> np.ndarray:
    return np.full(rates.count, 1 / rates.count)


def _at(search: ChainSearch, rates: Rates, ratios: np.ndarray) -> float:
    return synthesise_at(search, rates, ratios).seconds


def _synthesis_rows(arguments: argparse.Namespace) -> Iterator[Row]:
    cases = [("ViT", layers, 2) for layers in (4, 8, 12, 16, 24, 48)]
    cases += [("BERT", 12, 2), ("BERT-MoE", 8, 2), ("VGG19", 19, 2)]
    cases += [("ViT", 12, devices) for devices in (8, 16, 32, 64)]
    for name, layers, devices in cases:
        command = [sys.executable, __file__, "one", "--model", name]
        command += ["--layers", str(layers), "--devices", str(devices)]
        rows = []
        for _ in range(arguments.rounds):
            made = subprocess.run(command, capture_output=True, text=True, check=True)
            rows.append(json.loads(made.stdout))
        yield sorted(rows, key=lambda row: row["seconds"])[len(rows) // 2]


def _model(name: str, layers: int, devices: int) -> HapModel:
    examples = 64 * devices
    if name == "ViT":
        return vit(examples, layers)
    if name == "BERT":
        return bert(examples, layers)
    if name == "BERT-MoE":
        return bert(examples // 2, layers, experts=2 * devices)
    return vgg19(examples)


@seldom_collected()
def _one(arguments: argparse.Namespace) -> list[Row]:
    """One search, with garbage collected as seldom as the command does."""
    devices = arguments.devices
    traced = Traced(_model(arguments.model, arguments.layers, devices))
    began = time.perf_counter()
    chain = traced.chain
    tracing = time.perf_counter() - began
    fast = max(1, devices // 4)
    rates = published_rates(fast, devices - fast)
    began = time.perf_counter()
    search = ChainSearch(chain, STATE)
    built = time.perf_counter() - began
    found = synthesise(search, rates)
    return [
        {
            "model": arguments.model,
            "layers": arguments.layers,
            "devices": devices,
            "seconds": time.perf_counter() - began,
            "building_seconds": built,
            "tracing_seconds": tracing,
            "expansions": found.expansions,
            "proven_gap": found.program.gap,
        }
    ]


def _figures_rows(arguments: argparse.Namespace) -> Iterator[Row]:
    for is_like, counts in ((False, (8, 16, 32, 64)), (True, (8, 16, 24, 32))):
        for gpus in counts:
            fast = 0 if is_like else gpus // 4
            rates = published_rates(fast, gpus - fast)
            for model in paper_models(gpus):
                yield from _systems(model, gpus, rates, is_like=is_like)


def _systems(model: HapModel, gpus: int, rates: Rates, *, is_like: bool) -> Iterator[Row]:
    search = ChainSearch(Traced(model).chain, STATE)
    parallel = search.among(DATA_PARALLEL)
    times = {
        "DP-EV": _at(parallel, rates, _even(rates)),
        "DP-CP": _at(parallel, rates, rates.proportional),
        "DeepSpeed-like": _at(search.among(DEEPSPEED), rates, _even(rates)),
        "hetjax": synthesise(search, rates).seconds,
    }
    best = min(seconds for system, seconds in times.items() if system != "hetjax")
    data = min(times["DP-EV"], times["DP-CP"])
    for system, seconds in times.items():
        yield {
            "model": model.name,
            "gpus": gpus,
            "cluster": "like" if is_like else "unlike",
            "system": system,
            "step_time": seconds,
            "times_best_data_parallelism": data / seconds,
            "times_best_baseline": best / seconds,
            "is": "predicted",
        }


def _ablation_rows(arguments: argparse.Namespace) -> Iterator[Row]:
    gpus = arguments.gpus
    for model in paper_models(gpus):
        search = ChainSearch(Traced(model).chain, STATE)
        padded = published_rates(gpus // 4, gpus - gpus // 4, grouped=False)
        rates = published_rates(gpus // 4, gpus - gpus // 4)
        steps = {
            "data parallelism, even": _at(search.among(DATA_PARALLEL), padded, _even(padded)),
            "+ synthesis": _at(search, padded, _even(padded)),
            "+ ratios": synthesise(search, padded).seconds,
            "+ choice of gather": synthesise(search, rates).seconds,
        }
        first = steps["data parallelism, even"]
        for name, seconds in steps.items():
            yield {
                "model": model.name,
                "gpus": gpus,
                "system": name,
                "step_time": seconds,
                "times_even": first / seconds,
                "is": "predicted",
            }


def _optimal_rows(arguments: argparse.Namespace) -> Iterator[Row]:
    """The search beside HiGHS on one module each, and composed chains beside whole ones."""
    rates = published_rates(1, 3)
    blocks = [vgg19(256), vit(256, 1), bert(256, 1), bert(128, 2, experts=8)]
    for model in blocks:
        yield from _beside_integer_program(model.name, Traced(model, is_whole=True).chain, rates)
    rng = Random(arguments.seed)
    for number in range(arguments.programs):
        model = random_model(rng)
        chain = Traced(model, is_whole=True).chain
        yield from _beside_integer_program(f"random {number}", chain, rates)
    for layers in (2, 3, 4):
        model = vit(256, layers)
        chains = (Traced(model, is_whole=each).chain for each in (False, True))
        composed, whole = (ChainSearch(chain, STATE) for chain in chains)
        yield {
            "case": f"ViT, {layers} blocks, composed",
            "seconds": _bound(composed, rates),
            "oracle_seconds": _bound(whole, rates),
            "oracle": "the same search of the whole program as one module",
        }


def _weights(rates: Rates) -> np.ndarray:
    weights = np.zeros(rates.count)
    weights[-1] = 1.0
    return weights


def _bound(search: ChainSearch, rates: Rates) -> float:
    shares = np.tile(rates.proportional, (len(search.dimensions.units), 1))
    return search.best(rates, [shares] * len(search.networks), _weights(rates)).bound


def _beside_integer_program(name: str, chain: ModuleChain, rates: Rates) -> Iterator[Row]:
    search = ChainSearch(chain, STATE)
    (network,) = search.networks
    shares = np.tile(rates.proportional, (len(search.dimensions.units), 1))
    began = time.perf_counter()
    found = search.best(rates, [shares], _weights(rates))
    seconds = time.perf_counter() - began
    tables = network.tables(*search.costs(0, rates, shares, _weights(rates)))
    began = time.perf_counter()
    solution = solve(as_graph(network.sizes, network.scopes, tables, {}))
    assert solution is not None, "there is a program"
    yield {
        "case": name,
        "seconds": found.bound,
        "oracle_seconds": solution.seconds,
        "oracle": "integer program (HiGHS)",
        "search_seconds": seconds,
        "oracle_search_seconds": time.perf_counter() - began,
    }


def random_model(rng: Random) -> HapModel:
    """A random model of the paper's kinds, of unlike sizes."""
    examples = 4 * rng.randint(1, 64)
    width = 12 * rng.randint(1, 16)
    if rng.random() < 0.3:
        return vgg19(examples, 32, 8 * rng.randint(1, 256))
    hidden, heads = 8 * rng.randint(1, 128), rng.choice([1, 2, 3, 4, 6, 12])
    if rng.random() < 0.5:
        return vit(examples, 1, width, hidden, heads)
    vocabulary = rng.choice([32, 512, 4096])
    return bert(examples, 1, 0, rng.choice([16, 64]), width, hidden, heads, vocabulary)


def _experts_rows(arguments: argparse.Namespace) -> Iterator[Row]:
    """Whole experts for each device as is best, beside as many on each, some of them idle."""
    for experts in range(4, 17):
        rates = published_rates(2, 2, fast_flops=FASTEST)
        times = {}
        for name, padded in (("uneven", 0), ("padded", -(-experts // 4) * 4)):
            model = bert(128, 12, experts=experts, padded=padded)
            search = ChainSearch(Traced(model).chain, STATE)
            if name == "uneven":
                times[name] = synthesise(search, rates).seconds
            else:
                times[name] = _at(search.among(DEEPSPEED), rates, _even(rates))
        yield {
            "experts": experts,
            "step_time": times["uneven"],
            "padded_step_time": times["padded"],
            "times_padded": times["padded"] / times["uneven"],
            "is": "predicted",
        }


PARTS = {
    "synthesis": _synthesis_rows,
    "figures": _figures_rows,
    "ablation": _ablation_rows,
    "optimal": _optimal_rows,
    "experts": _experts_rows,
    "lab": lab_rows,
    "experts-lab": experts_lab_rows,
    "accuracy": accuracy_rows,
    "one-space": one_space_rows,
    "methods": methods_rows,
    "one": _one,
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark.

    Args:
        argv: its options; None for this process's.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--json", action="store_true", help="a row a line, as JSON")
    parser.add_argument(
        "--rounds", type=int, default=3, help="of steps, or processes, whose median counts"
    )
    parser.add_argument("--profile", help="where to keep what is measured of the lab's hosts")
    parser.add_argument(
        "--rates", type=float, nargs="+", default=RATES, help="of the link in `lab`, in Mbit/s"
    )
    parser.add_argument("--mbit", type=float, default=1000.0, help="of the link in `accuracy`")
    parser.add_argument("--variants", type=int, default=24, help="models of `accuracy`")
    parser.add_argument("--gpus", type=int, default=32, help="of `ablation`")
    parser.add_argument("--programs", type=int, default=50, help="random programs of `optimal`")
    parser.add_argument("--seed", type=int, default=0, help="of these, and of variants")
    parser.add_argument("--model", default="ViT", help="of `one`")
    parser.add_argument("--layers", type=int, default=12, help="of `one`")
    parser.add_argument("--devices", type=int, default=2, help="of `one`")
    arguments = parser.parse_args(argv)
    for row in PARTS[arguments.part](arguments):
        if arguments.json or arguments.part == "one":
            print(json.dumps(row), flush=True)
        else:
            print("  ".join(f"{name} {_shown(value)}" for name, value in row.items()), flush=True)


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
