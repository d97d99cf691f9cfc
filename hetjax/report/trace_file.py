"""Timelines as files that Perfetto opens."""

from __future__ import annotations

import json
import os

from hetjax.files import replacing
from hetjax.pipeline.timeline.timeline import Timeline


def write_chrome_trace(timeline: Timeline, path: str | os.PathLike[str]) -> None:
    """Writes a timeline in the Chrome trace format, whole or not at all.

    Open the file at https://ui.perfetto.dev or in chrome://tracing.

    Args:
        timeline: predicted or measured.
        path: the file to write, usually ``timeline.json``.
    """
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(timeline.to_chrome_trace()), encoding="utf-8")
