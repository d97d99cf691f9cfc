"""The page about a plan holds all that it should, needs nothing else, and a browser draws it."""

import re
from dataclasses import replace
from pathlib import Path

from chromium import open_page

from hetjax.mesh import Cluster, Link, Subcluster, SubMesh, kind
from hetjax.pipeline.schedules.warm_up import one_f_one_b
from hetjax.pipeline.timeline.timeline import Event, Timeline
from hetjax.planner import (
    PartAlone,
    PipelinePlan,
    Plan,
    Prediction,
    StagePlan,
    StagePrediction,
    simulate,
)
from hetjax.planner.hexiseq.context_report import (
    ContextReport,
    DeviceRow,
    GroupRow,
    RingRow,
    SystemRow,
)
from hetjax.report import ModuleRun, OtherPlan, PlanReport, write_plan_page
from hetjax.report.shortened import MIDDLE, shortened

LINK = Link(1e9, 1e-6)


def report() -> PlanReport:
    names = ("new<b>", "old")
    parts = tuple(Subcluster(name, kind("T4"), 1, 2, LINK, LINK) for name in names)
    cluster = Cluster("a & b", parts, ((*names, LINK),))
    held = StagePrediction(
        1.0, 2.0, 0.0, 1.0, 1.0, 0.5, 0.25, 0.25, 4 * 10**9, 10**8, 10**9, 0, 0, 6 * 10**9,
        16 * 10**9, 0.2,
    )  # fmt: skip
    stages = tuple(
        StagePlan.on((s, s + 1), SubMesh(name, 0, (1, 2)), (2, 1)) for s, name in enumerate(names)
    )
    pipeline = PipelinePlan(stages, 4, 2, one_f_one_b(2, 4))
    prediction = Prediction(15.0, 12.0, (held, held))
    plan = Plan("m", (0, 1, 2), cluster, (pipeline,), prediction=prediction)
    return PlanReport(
        title="gpt on a & b",
        summary="<i>small</i>",
        plan=plan,
        timeline=simulate(plan),
        dtype="float32",
        figures={"step time": "15 s"},
        limits=[("stage 1 computing", 0.8)],
        costs=[3.0, 1.0],
        modules=[ModuleRun("A", (0, 1)), ModuleRun("A", (1, 2))],
        alternatives=[OtherPlan("1 stage instead of 2", 22.5, 1.5)],
        alone=[PartAlone(("old",), 2, 30.0), PartAlone(("new<b>",), 2, None)],
        context=context(),
        moves={0: Timeline((Event("link 0->0, member 1", "to member 0", "move", None, 0.0, 1.0),))},
    )


def context() -> ContextReport:
    """Two groups, the second of which has no tokens on its second device."""

    def row(name: str, tokens: int, positions: PositionRuns, heads: tuple[int, int]) -> DeviceRow:
        return DeviceRow(f"{name}[0]", name, 0, tokens, positions, heads, heads, 2.0, 1.0, 5e9, 9e9)

    halves = ((0, 30), (70, 100))
    first = GroupRow(halves, 60, (row("new<b>", 60, halves, (0, 4)),))
    inner = ((30, 70),)
    second = GroupRow(inner, 40, (row("old", 40, inner, (0, 3)), row("old", 0, (), (3, 4))))
    rings = (RingRow((0, 3), (0, 3), ("new<b>[0]", "old[0]")),)
    systems = (
        SystemRow("hexiseq", (1, 2), 2, False, 4.0),
        SystemRow("ring", (1,) * 3, 1, True, 6.0),
    )
    return ContextReport(100, 4, 4, (first, second), rings, (), (*systems, SystemRow("usp")))


PositionRuns = tuple[tuple[int, int], ...]


def test_the_page_holds_all_of_a_plan_and_asks_for_nothing(tmp_path: Path):
    page = tmp_path / "plan.html"
    write_plan_page(page, report())
    text = page.read_text("utf-8")
    assert not re.search(r"https?:|src=|@import|{{", text)
    assert "<i>small</i>" not in text
    assert "new<b>" not in text
    for part in (
        "gpt on a &amp; b",
        "stage 1 computing",
        "new&lt;b&gt;[0:2] 1x2",
        "width: 75.000%",
        "6 GB of 16 GB",
        "1 stage instead of 2",
        "+50.0%",
        "22.5 s",
        "2.00 times",
        "does not fit",
        "Who shares the sequence",
        "inside stage 0, one microbatch",
        r"link 0-\u003e0, member 1",
        "left: 70.000%; width: 30.000%",
        "left: 75.000%; width: 25.000%",
        "new&lt;b&gt;[0], old[0]",
        "not legal, or fits in no way",
        "1.50",
    ):
        assert part in text, part


def test_a_browser_draws_it(tmp_path: Path):
    page = tmp_path / "plan.html"
    write_plan_page(page, report())
    seen = open_page(tmp_path / "browser", page)
    assert [each["data-rows"] for each in seen["sections"]] == ["4", "1"]


def test_labels_that_are_long_end_in_dots_and_are_told_whole(tmp_path: Path):
    page, label = tmp_path / "plan.html", f"stage 1 on {'a name that is long ' * 9}computing"
    write_plan_page(page, replace(report(), limits=[(label, 0.8)]))
    script = """
        const cut = [...document.querySelectorAll(".lane > b")].filter(
            (each) => each.scrollWidth > each.clientWidth
                && getComputedStyle(each).textOverflow === "ellipsis"
                && getComputedStyle(each).overflow === "hidden"
        );
        document.body.dataset.cut = cut.map((each) => each.title).join("; ");
    """
    assert open_page(tmp_path / "browser", page, script)["body"]["data-cut"] == label


def test_a_plan_without_structure_or_alternatives_has_a_page_too(tmp_path: Path):
    page = tmp_path / "plan.html"
    write_plan_page(page, replace(report(), modules=(), alternatives=(), alone=()))
    text = page.read_text("utf-8")
    assert "What else" not in text
    assert "Does it pay" not in text


def test_a_long_timeline_keeps_both_ends_and_where_the_rows_are_busy():
    events = tuple(
        Event(f"stage {s}", f"F{m}", "F", m, m + s, m + s + 1.0)
        for m in range(50)
        for s in range(2)
    )
    short = shortened(Timeline(events), 20)
    assert len(short.events) == 22
    assert short.makespan == Timeline(events).makespan
    middle = [event for event in short.events if event.kind == MIDDLE]
    assert sorted(event.track for event in middle) == ["stage 0", "stage 1"]
    for event in middle:
        kept = [each for each in short.on(event.track) if each is not event]
        assert all(each.end <= event.start or each.start >= event.end for each in kept)
    assert shortened(Timeline(events), 100) == Timeline(events)
