"""Pictures hold a row for every track, numbers where they fit, and both panels on one axis."""

from pathlib import Path

import matplotlib
import pytest

from hetjax.pipeline.schedules.warm_up import one_f_one_b
from hetjax.pipeline.timeline.simulate import simulate_schedule
from hetjax.pipeline.timeline.timeline import Event, Timeline, stage_track
from hetjax.pipeline.timeline.times import StepTimes
from hetjax.report.timeline_picture import draw_timeline
from hetjax.report.timeline_style import event_style


def timeline(num_stages: int = 3, num_microbatches: int = 4, scale: float = 1.0) -> Timeline:
    links = num_stages - 1
    times = StepTimes(
        forward=[0.01 * scale] * num_stages,
        backward=[0.02 * scale] * num_stages,
        sends=[0.005] * links,
        returns=[0.005] * links,
        update=[0.002] * num_stages,
    )
    return simulate_schedule(one_f_one_b(num_stages, num_microbatches), times)


def texts(axes) -> list[str]:
    return [text.get_text() for text in axes.texts]


def test_one_timeline_names_its_tracks_and_numbers_its_boxes(tmp_path: Path):
    drawn = timeline()
    figure = draw_timeline(drawn, tmp_path / "timeline.png", title="a step")
    (axes,) = figure.axes
    assert set(drawn.tracks) <= set(texts(axes))
    assert texts(axes).count("3") == 2 * 3
    assert sum(text.startswith("bubble ") for text in texts(axes)) == 3
    assert figure.texts[0].get_text() == "a step"
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")


def test_prediction_stands_above_measurement_on_one_axis():
    predicted, measured = timeline(), timeline(scale=1.5)
    figure = draw_timeline(measured, predicted=predicted)
    above, below = figure.axes
    assert above.get_xlim() == below.get_xlim() == (0, measured.makespan * 1e3)
    assert above.get_position().y0 > below.get_position().y1
    assert any(text.startswith("predicted: ") for text in texts(above))
    assert any(text.startswith("measured: ") for text in texts(below))


def test_the_names_of_members_are_inside_the_picture():
    tracks = [stage_track(stage, member) for stage in (0, 12) for member in (0, 11)]
    figure = draw_timeline(Timeline(tuple(Event(t, "F0", "F", 0, 0.0, 1.0) for t in tracks)))
    (axes,) = figure.axes
    names = [text for text in axes.texts if text.get_text() in tracks]
    assert len(names) == len(tracks)
    assert all(text.get_window_extent().x0 > 0 for text in names)


def test_numbers_that_do_not_fit_are_left_out():
    (axes,) = draw_timeline(timeline(num_stages=2, num_microbatches=200)).axes
    assert not any(text.isdigit() for text in texts(axes))


@pytest.mark.parametrize(
    "events",
    [
        (),
        (Event("stage 0", "F0", "F", 0, 5.0, 5.0),),
        (Event("worker a", "compile", "compile", None, 5.0, 6.0),),
        (Event("link 0->1", "F0", "send", 0, 5.0, 6.0),),
    ],
    ids=["none", "no length", "a runtime's own", "a link alone"],
)
def test_unusual_timelines_are_drawn(events: tuple[Event, ...], tmp_path: Path):
    draw_timeline(Timeline(events), tmp_path / "timeline.png")
    assert (tmp_path / "timeline.png").exists()


def test_drawing_leaves_matplotlibs_settings_alone():
    before = dict(matplotlib.rcParams)
    draw_timeline(timeline())
    assert dict(matplotlib.rcParams) == before


def test_every_operation_has_a_color_of_its_own_in_the_legend():
    kinds = ("F", "R", "B", "W", "update")
    events = tuple(Event("stage 0", f"{k}0", k, 0, i, i + 1.0) for i, k in enumerate(kinds))
    styles = [event_style(event) for event in events]
    assert len({style.color for style in styles}) == len(kinds)
    (legend,) = draw_timeline(Timeline(events)).legends
    assert [text.get_text() for text in legend.get_texts()] == [style.label for style in styles]
