"""The trace file is the timeline's Chrome trace, in JSON."""

import json
from pathlib import Path

from hetjax.pipeline.schedules.warm_up import one_f_one_b
from hetjax.pipeline.timeline.simulate import simulate_schedule
from hetjax.pipeline.timeline.times import StepTimes
from hetjax.report.trace_file import write_chrome_trace


def test_the_file_holds_the_trace(tmp_path: Path):
    timeline = simulate_schedule(one_f_one_b(2, 3), StepTimes([0.1] * 2, [0.2] * 2, [0.05], [0.05]))
    write_chrome_trace(timeline, tmp_path / "timeline.json")
    assert json.loads((tmp_path / "timeline.json").read_text()) == timeline.to_chrome_trace()
