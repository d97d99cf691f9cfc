"""Pages hold every row and box, and a browser draws, zooms and explains them without an error."""

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from chromium import open_page

from hetjax.pipeline.timeline.timeline import Event, Timeline
from hetjax.report.timeline_page import write_timeline_page

PREDICTED = Timeline(
    (
        Event("stage 0", "F0", "F", 0, 0.0, 0.010),
        Event("link 0->1", "F0", "send", 0, 0.010, 0.014),
        Event("stage 1", "R0", "R", 0, 0.014, 0.020),
        Event("stage 1", "B0", "B", 0, 0.020, 0.040),
        Event("stage 1", "W0", "W", 0, 0.040, 0.050),
    )
)
MEASURED = Timeline(
    (
        *(Event("stage 0", f"F{m}", "F", m, 5 + m * 0.01, 5.008 + m * 0.01) for m in range(4)),
        Event("link 0->1", "F0", "send", 0, 5.010, 5.050, 2_000_000),
        Event("stage 1", "B0", "B", 0, 5.050, 5.090),
        Event("stage 1", "compile", "compile", None, 5.090, 5.1),
    )
)

# Chromium prints the page as it is once it has loaded; what users do is done by a script.
PICK = """
const chart = document.querySelectorAll(".chart")[1], box = chart.getBoundingClientRect();
const at = (x, y) => ({ clientX: box.left + x, clientY: box.top + y, bubbles: true });
chart.dispatchEvent(new PointerEvent("pointermove", at(3, 10)));
document.body.dataset.tip = document.getElementById("tip").innerText;
"""
KEYS = """
const chart = document.querySelectorAll(".chart")[1];
const say = (name) => { document.body.dataset[name] = root.dataset.picked; };
const press = (key) => chart.dispatchEvent(new KeyboardEvent("keydown", { key }));
press("ArrowRight"); say("first");
press("ArrowRight"); say("second");
press("ArrowDown"); say("below");
document.body.dataset.said = document.getElementById("spoken").textContent;
press("Escape"); say("none");
"""
ZOOM = """
const chart = document.querySelector(".chart"), box = chart.getBoundingClientRect();
const note = (name) => { drawNow(); document.body.dataset[name] = `${view.from} ${view.to}`; };
const wheel = (deltaY) => chart.dispatchEvent(new WheelEvent("wheel", { deltaY,
  clientX: box.left + box.width / 2, clientY: box.top + 5, cancelable: true }));
note("whole");
document.body.dataset.scrolls = wheel(100);
wheel(-500); note("zoomed");
const drag = (type, x) => chart.dispatchEvent(new PointerEvent(type, { clientX: x }));
chart.setPointerCapture = () => {};
drag("pointerdown", 500); drag("pointermove", 400); drag("pointerup", 400); note("moved");
chart.dispatchEvent(new MouseEvent("dblclick")); note("reset");
document.querySelector("[data-zoom=in]").click(); note("button");
"""

QUEUE = """
document.body.dataset.spans = panels[0].rows[0].boxes
  .map((box) => `${box.from} ${box.start + box.seconds}`).join(" ");
"""

Browse = Callable[..., dict[str, Any]]


@pytest.fixture
def browse(tmp_path: Path) -> Browse:
    """Opens a page, runs a script in it, and gives what the page holds then."""
    return partial(open_page, tmp_path / "browser")


def numbers(text: str) -> list[float]:
    return [float(each) for each in text.split()]


def content(page: Path) -> dict[str, Any]:
    found = re.search(r'<script id="timeline"[^>]*>(.*?)</script>', page.read_text("utf-8"), re.S)
    assert found is not None
    return json.loads(found[1])


def test_the_page_holds_every_event_on_one_axis_and_asks_for_nothing(tmp_path: Path):
    page = tmp_path / "timeline.html"
    write_timeline_page(page, MEASURED, PREDICTED)
    text = page.read_text("utf-8")
    assert not re.search(r"https?:|src=|@import|{{", text)
    held = content(page)
    assert held["seconds"] == pytest.approx(0.1)
    assert [panel["name"] for panel in held["panels"]] == ["predicted", "measured"]
    rows = {row["track"]: row for row in held["panels"][1]["rows"]}
    assert list(rows) == ["stage 0", "link 0->1", "stage 1"]
    assert rows["link 0->1"]["link"]
    name, style, microbatch, start, seconds, num_bytes = rows["link 0->1"]["boxes"][0]
    assert (name, microbatch, start, seconds, num_bytes) == ("F0", 0, 0.01, 0.04, 2_000_000)
    assert held["styles"][style]["label"] == "activation on a link"
    labels = [each["label"] for each in held["styles"]]
    assert labels == [
        "forward",
        "recomputation",
        "backward",
        "weight gradient",
        "activation on a link",
        "compile",
    ]


@pytest.mark.parametrize("name", ["</script><script>alert(1)</script>", "<!-- & {{data}} -->"])
def test_no_name_breaks_out_of_the_page(tmp_path: Path, name: str):
    page = tmp_path / "timeline.html"
    write_timeline_page(page, Timeline((Event(name, name, name, None, 0.0, 1.0),)), title=name)
    text = page.read_text("utf-8")
    assert text.count("</script>") == 2
    assert name not in text
    assert content(page)["panels"][0]["rows"][0]["track"] == name


def test_a_browser_draws_every_row_and_box(tmp_path: Path, browse: Browse):
    page = tmp_path / "timeline.html"
    write_timeline_page(page, MEASURED, PREDICTED, "a <b>step</b>")
    seen = browse(page)
    assert seen["sections"] == [
        {"data-rows": "3", "data-boxes": "5"},
        {"data-rows": "3", "data-boxes": "7"},
    ]
    assert "measured over predicted: 2" in seen["text"]
    assert "<h1>a &lt;b&gt;step&lt;/b&gt;</h1>" in seen["text"]


def test_a_browser_draws_a_timeline_without_events(tmp_path: Path, browse: Browse):
    page = tmp_path / "timeline.html"
    write_timeline_page(page, Timeline(()))
    assert browse(page)["sections"] == [{"data-rows": "0", "data-boxes": "0"}]


def test_a_box_under_the_pointer_is_explained(tmp_path: Path, browse: Browse):
    page = tmp_path / "timeline.html"
    write_timeline_page(page, MEASURED, PREDICTED)
    seen = browse(page, PICK)
    assert seen["html"]["data-picked"] == "stage 0 F0"
    tip = seen["body"]["data-tip"].split("\n")
    assert "F0: forward" in tip[0]
    pairs = [line for line in tip[1:] if line]
    assert dict(zip(pairs[::2], pairs[1::2], strict=True)) == {
        "on": "stage 0",
        "microbatch": "0",
        "start": "0 s",
        "duration": "8 ms",
        "predicted": "10 ms",
    }


def test_the_keyboard_goes_from_box_to_box(tmp_path: Path, browse: Browse):
    page = tmp_path / "timeline.html"
    write_timeline_page(page, MEASURED, PREDICTED)
    body = browse(page, KEYS)["body"]
    assert body["data-first"] == "stage 0 F0"
    assert body["data-second"] == "stage 0 F1"
    assert body["data-below"] == "link 0-&gt;1 F0"
    assert "bytes 2 MB, rate 50 MB/s" in body["data-said"]
    assert body["data-none"] == ""


def test_wheel_drag_and_double_click_move_the_view(tmp_path: Path, browse: Browse):
    page = tmp_path / "timeline.html"
    write_timeline_page(page, MEASURED, PREDICTED)
    body = browse(page, ZOOM)["body"]
    whole, zoomed, moved, reset, button = (
        numbers(body[f"data-{name}"]) for name in ("whole", "zoomed", "moved", "reset", "button")
    )
    assert body["data-scrolls"] == "true", "zoomed out all the way, the wheel is the page's"
    assert whole[0] == 0.0 < zoomed[0] < zoomed[1] < whole[1]
    assert moved[0] > zoomed[0]
    assert moved[1] - moved[0] == pytest.approx(zoomed[1] - zoomed[0])
    assert reset == whole
    assert button[1] - button[0] == pytest.approx(whole[1] / 1.5)


def test_a_transfer_that_waits_for_another_is_drawn_from_its_end_on(tmp_path: Path, browse: Browse):
    page = tmp_path / "timeline.html"
    spans = [(0.0, 4.0), (1.0, 6.0), (2.0, 5.0), (9.0, 10.0)]
    events = tuple(Event("link 0->1", f"F{m}", "send", m, *each) for m, each in enumerate(spans))
    write_timeline_page(page, Timeline(events))
    assert numbers(browse(page, QUEUE)["body"]["data-spans"]) == [0, 4, 4, 6, 2, 5, 9, 10]
