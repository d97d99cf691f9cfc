"""A person's questions to the planner: the answer, what it is compared with, whether that holds.

Every answer is compared with something that is found in another way: a part of the cluster that is
planned for by itself, a search that is restricted by hand, another objective, every plan there is.
It holds where it is no worse than any of these, and within 1% of the best of every plan. By itself
the script asserts nothing: its exit code is 0 whatever holds, and 1 where a question could not be
asked.

python scripts/check_questions.py
python scripts/check_questions.py --json
python scripts/check_questions.py --only "two PCs" --json
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from asking import Asked, Part, cost_per_step, in_words, step_time
from every_cut import best_of_every_cut

from hetjax.commands.prepare import Prepared
from hetjax.errors import InputError
from hetjax.planner import Shares, predict

ROUNDING = 1e-6
"""By what share figures that are the same may differ."""

CASES = ("--cases", "200")
"""How many random cases are compared with every plan."""

NEAR_THE_BEST = 0.01
"""How much slower than the best of all plans an answer may be: the search promises no less."""

HERE = Path(__file__).parent
CONFIGS = HERE.parent / "configs"


VOCABULARIES = {"gpt2": 50257, "gpt": 51200, "llama": 32000}
"""Tokens by family. With a vocabulary of bytes there would be no tables to exchange."""


class Question(NamedTuple):
    """What a person asks.

    Args:
        name: in a few words.
        asked: what is put to the planner.
        compared: by what it is called, what else is put to it.
        figure: what is compared; less is better.
    """

    name: str
    asked: Asked
    compared: dict[str, Asked]
    figure: Callable[[Prepared], float] = step_time


def settings(recipe: str, batch: int, *more: str) -> tuple[str, ...]:
    """Settings of a question, with the vocabulary that the model is published with."""
    return (
        f"model.recipe = '{recipe}'",
        f"model.vocabulary = {VOCABULARIES[recipe.partition('-')[0]]}",
        "data.kind = 'synthetic'",
        f"train.batch_size = {batch}",
        *more,
    )


def asked(network: str, chosen: tuple[str, ...], *parts: Part) -> Asked:
    """A model on a cluster."""
    return Asked(parts, network, chosen)


def alone(whole: Asked, *places: int) -> Asked:
    """The same on some of the parts."""
    return replace(whole, parts=tuple(whole.parts[place] for place in places))


def parts_alone(whole: Asked) -> dict[str, Asked]:
    """The same on each of the parts."""
    return {
        f"{part.nodes * part.devices} {part.kind_in_file()[0]} alone": alone(whole, place)
        for place, part in enumerate(whole.parts)
    }


FREE, SCANNED = "train.microbatches = None", "model.scan_blocks = True"
SGD = "optimizer.name = 'sgd'"
LLAMA = settings("llama-7b", 32, "train.microbatches = 32", "model.sequence = 2048")

_PCS = (Part("RTX4090", 1, 1), Part("RTX3080", 1, 2))
_BATCH_32 = asked("2.5 Gbit/s", settings("gpt2-medium", 32, FREE), *_PCS)
_BATCH_16 = asked("2.5 Gbit/s", settings("gpt2-medium", 16, FREE), *_PCS)
_FOUR_CARDS = asked("10 Gbit/s", (*LLAMA, SGD), Part("RTX4090", 2, 2), Part("RTX3080", 2, 2))
_A100_V100 = asked(
    "25 Gbit/s",
    settings("llama-7b", 32, "train.microbatches = 32", SCANNED),
    *(Part("A100-80", 1, 8), Part("V100e", 2, 8)),
)
_H100_MI300X = asked("100 Gbit/s", LLAMA, Part("H100", 1, 8), Part("MI300X", 1, 8))
_TPU_V4_V5E = asked("100 Gbit/s", LLAMA, Part("TPUv4", 2, 4), Part("TPUv5e", 2, 8))
_TPU_V5P_V5E = asked("100 Gbit/s", LLAMA, Part("TPUv5p", 2, 4), Part("TPUv5e", 2, 8))
_SLOW_NODE = asked(
    "100 Gbit/s",
    settings("gpt-2.6b", 64, "train.microbatches = 16"),
    *(Part("A100-40", 3, 4), Part("A100-40", 1, 4, speed=0.5)),
)
_PRICED = asked(
    "100 Gbit/s",
    settings("llama-7b", 64, "train.microbatches = 64", SCANNED, "planner.objective = 'cost'"),
    *(Part("H100", 2, 8, 3.0), Part("A100-80", 4, 8, 1.2), Part("T4", 4, 4, 0.2)),
)
_PRICED_SHORT = replace(_PRICED, settings=(*_PRICED.settings, "model.sequence = 2048"))


HARDEST = "two nodes of H100 and two of A100"
"""What once was cheaper than what the planner found on more nodes."""


def at_a_price(whole: Asked) -> dict[str, Asked]:
    """Clusters that are rented by hand, and the fastest plan."""
    h100, a100, t4 = whole.parts
    fastest = tuple(each for each in whole.settings if "objective" not in each)
    rented = {
        HARDEST: (h100, a100._replace(nodes=2)),
        "one node of H100": (h100._replace(nodes=1),),
        "one node of H100 and one of T4": (h100._replace(nodes=1), t4._replace(nodes=1)),
        "the four nodes of A100": (a100,),
    }
    return {
        **{name: replace(whole, parts=parts) for name, parts in rented.items()},
        "the fastest plan": replace(whole, settings=fastest),
    }


QUESTIONS = (
    Question(
        "two PCs, gpt2-medium, batch 32: are two 3080 in another PC worth it beside a 4090?",
        _BATCH_32,
        {"the 4090 alone": alone(_BATCH_32, 0)},
    ),
    Question(
        "two PCs, gpt2-medium, batch 16: are two 3080 in another PC worth it beside a 4090?",
        _BATCH_16,
        {"the 4090 alone": alone(_BATCH_16, 0)},
    ),
    Question(
        "two machines of two 4090 and two 3080, Llama-7B: which card for what?",
        _FOUR_CARDS,
        {
            "4 RTX4090 alone": alone(_FOUR_CARDS, 0),
            "two stages at most": replace(
                _FOUR_CARDS, settings=(*_FOUR_CARDS.settings, "planner.max_stages = 2")
            ),
        },
    ),
    Question("A100 and V100, Llama-7B with scanned blocks", _A100_V100, parts_alone(_A100_V100)),
    Question("H100 and MI300X, Llama-7B", _H100_MI300X, parts_alone(_H100_MI300X)),
    Question("TPU v4 and v5e, Llama-7B", _TPU_V4_V5E, parts_alone(_TPU_V4_V5E)),
    Question("TPU v5p and v5e, Llama-7B", _TPU_V5P_V5E, parts_alone(_TPU_V5P_V5E)),
    Question(
        "one slow node among four of A100, GPT-2.6B: is it worth keeping?",
        _SLOW_NODE,
        {
            "the three others alone": alone(_SLOW_NODE, 0),
            "all four as slow as it": replace(
                _SLOW_NODE, parts=(Part("A100-40", 4, 4, speed=0.5),)
            ),
        },
    ),
    Question(
        "prices: the cheapest way to train Llama-7B on H100, A100 and T4",
        _PRICED,
        {name: at_a_price(_PRICED)[name] for name in ("the four nodes of A100", HARDEST)},
        cost_per_step,
    ),
    Question(
        "prices: the same with half as long texts",
        _PRICED_SHORT,
        at_a_price(_PRICED_SHORT),
        cost_per_step,
    ),
)


def answered(question: Question) -> dict[str, Any]:
    """What is answered to a question, beside what it is compared with."""
    prepared = question.asked.prepared()
    figure = question.figure(prepared)
    compared = {name: _figure(other, question.figure) for name, other in question.compared.items()}
    known = [other for other in compared.values() if other is not None]
    return {
        "answer": in_words(prepared.plan),
        question.figure.__name__: figure,
        "compared_with": compared,
        "holds": all(figure <= other * (1 + ROUNDING) for other in known),
    }


def _figure(other: Asked, figure: Callable[[Prepared], float]) -> float | None:
    """The figure of what an answer is compared with; None where the model does not fit there."""
    try:
        return figure(other.prepared())
    except InputError:
        return None


def where_to_cut() -> dict[str, Any]:
    """A 4090 and a 3080, every cut, order and way to run the stages: within 1% of the best?"""
    pair = asked(
        "25 GB/s",
        settings("gpt2-small", 16, "train.microbatches = 8", "model.blocks = 4", SGD),
        *(Part("RTX4090", 1, 1), Part("RTX3080", 1, 1)),
    )
    prepared = pair.prepared()
    assert prepared.planned is not None
    best, number = best_of_every_cut(prepared.planned.problem)
    return {
        "answer": in_words(prepared.plan),
        "step_time": step_time(prepared),
        "compared_with": {f"the best of {number} plans, each predicted": best},
        "holds": step_time(prepared) <= best * (1 + NEAR_THE_BEST),
    }


def unlike_cards_of_a_box() -> dict[str, Any]:
    """Issue 580 of timm: 2,000 images a second with equal batches, 2,500 with unequal ones."""
    images = settings_of_images("resnet-50", 256, SGD)
    box = asked("25 GB/s", images, Part("A6000", 1, 2), Part("RTX2080Ti", 1, 2))
    found = shared_stage(box)
    even_over_planned = found["compared_with"][EVEN] / found["step_time"]
    return {
        **found,
        "answer": f"{found['answer']}: {even_over_planned:.2f} times the even split",
        "even_over_planned": even_over_planned,
        "holds": found["holds"] and even_over_planned >= 1.25,
    }


def unlike_memories_of_a_box() -> dict[str, Any]:
    """Half of the images do not fit into the small card: it has what does, the other the rest."""
    images = settings_of_images("resnet-50", 320, SGD)
    small = Part("T4", 1, 1, memory="8 GB")
    found = shared_stage(asked("25 GB/s", images, Part("T4", 1, 1), small))
    return {**found, "holds": found["holds"] and found["compared_with"][EVEN] is None}


EVEN = "an even split of the batch"


def shared_stage(box: Asked) -> dict[str, Any]:
    """The answer where by default all cards share one stage unevenly, beside what that beats."""
    prepared = box.prepared()
    (stage,) = prepared.plan.stages
    compared = {EVEN: _time_if_it_fits(with_even_shares(prepared))}
    compared |= {name: _figure(other, step_time) for name, other in parts_alone(box).items()}
    planned = step_time(prepared)
    is_whole = prepared.plan.pipeline.num_microbatches == 1
    is_uneven = len(set(stage.shares.batch)) == len(stage.members) > 1
    return {
        "answer": in_words(prepared.plan),
        "step_time": planned,
        "compared_with": compared,
        "holds": is_whole
        and is_uneven
        and all(planned <= other for other in compared.values() if other is not None),
    }


def _time_if_it_fits(prepared: Prepared) -> float | None:
    prediction = prepared.plan.predicted
    return prediction.step_time if all(stage.fits for stage in prediction.stages) else None


def settings_of_images(recipe: str, batch: int, *more: str) -> tuple[str, ...]:
    """Settings of a question about an image model."""
    named = (f"model.recipe = '{recipe}'", "data.kind = 'shapes'", f"train.batch_size = {batch}")
    return (*named, *more)


def with_even_shares(prepared: Prepared) -> Prepared:
    """The same stage with as many examples on each of its devices."""
    assert prepared.planned is not None
    (stage,) = prepared.plan.stages
    size = prepared.plan.pipeline.microbatch_size
    even = Shares(
        batch=tuple(size * m.submesh.num_devices // stage.num_devices for m in stage.members)
    )
    pipeline = replace(prepared.plan.pipeline, stages=(replace(stage, shares=even),))
    plan = predict(replace(prepared.plan, pipelines=(pipeline,)), prepared.planned.problem)
    return replace(prepared, plan=plan)


def best_of_random_cases() -> dict[str, Any]:
    """Line 12: in how many random small cases the answer is the best of all plans."""
    found = json.loads(_output([sys.executable, str(HERE / "check_best.py"), *CASES, "--json"]))
    within, worst = found["within_1_percent"], found["worst_slower"]
    return {
        "answer": f"within 1% of the best in {within:.1%} of {found['cases']} cases",
        "compared_with": {"every plan, simulated: worst slower by": worst},
        "holds": within >= 0.98 and worst <= 0.03,
    }


def seconds_to_plan(configuration: Path, wanted: float) -> dict[str, Any]:
    """Line 13: processor time of the whole command."""
    before = processor_seconds()
    command = [sys.executable, "-m", "hetjax.plan", "--json", "--config", str(configuration)]
    found = json.loads(_output(command))
    seconds = processor_seconds() - before
    return {
        "answer": f"{seconds:.1f} s of processor time for a plan of {found['step_time']:.3g} s",
        "seconds": seconds,
        "compared_with": {"wanted": wanted},
        "holds": seconds <= wanted,
    }


def processor_seconds() -> float:
    """What this process and those that it waited for have used."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in used)


def _output(command: Sequence[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def seconds_for_four_cards() -> dict[str, Any]:
    """Line 13: gpt2-medium on four cards of one box, microbatches free."""
    box = asked(
        "25 GB/s",
        settings("gpt2-medium", 32, FREE),
        *(Part("RTX4090", 1, 2), Part("RTX3080", 1, 2)),
    )
    with tempfile.TemporaryDirectory() as folder:
        return seconds_to_plan(box.written(Path(folder)), 4.0)


OTHERS: dict[str, Callable[[], dict[str, Any]]] = {
    "two A6000 and two 2080 Ti in one box, ResNet-50: how to share the batch?": (
        unlike_cards_of_a_box
    ),
    "a card of 8 GB and one of 16 GB, as fast, ResNet-50: how to share the batch?": (
        unlike_memories_of_a_box
    ),
    "where to cut between a 4090 and a 3080 in one box, GPT-2 small of four blocks": where_to_cut,
    "is the answer the best plan? random small cases": best_of_random_cases,
    "how long does it take? Llama-7B at home": lambda: seconds_to_plan(
        CONFIGS / "llama7b_home_laboratory.gin", 4.0
    ),
    "how long does it take? gpt2-medium on four cards of one box": seconds_for_four_cards,
    "how long does it take? Harp's figure 7 (h)": lambda: seconds_to_plan(
        CONFIGS / "papers" / "harp" / "fig7h.gin", 15.0
    ),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Ask and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--only", default="", help="questions whose name has this in it")
    options = parser.parse_args(arguments)
    asks = {each.name: lambda each=each: answered(each) for each in QUESTIONS} | OTHERS
    rows: list[dict[str, Any]] = []
    for name, ask in asks.items():
        if options.only not in name:
            continue
        began = processor_seconds()
        try:
            row = ask()
        except (InputError, subprocess.CalledProcessError) as error:
            row = {"answer": None, "compared_with": {}, "holds": False, "error": str(error)}
        rows.append({"question": name, **row, "asking_seconds": processor_seconds() - began})
        print(_in_lines(rows[-1]), file=sys.stderr if options.json else sys.stdout)
    if options.json:
        print(json.dumps({"questions": rows}, indent=1))
    sys.exit(any("error" in row for row in rows))


def _in_lines(row: dict[str, Any]) -> str:
    held = "holds" if row["holds"] else "DOES NOT HOLD"
    figure = row.get("step_time", row.get("cost_per_step"))
    answer = row.get("error") or row["answer"]
    lines = [row["question"], f"  {held}: {answer}" + (f": {figure:.4g}" if figure else "")]
    for name, other in row["compared_with"].items():
        lines.append(f"  {name}: " + ("does not fit" if other is None else f"{other:.4g}"))
    return "\n".join([*lines, f"  asked in {row['asking_seconds']:.0f} s of processor time"])


if __name__ == "__main__":
    main()
