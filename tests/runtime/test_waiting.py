"""What is said of a wait for other hosts: once, after a while, what and where."""

import logging
import re

import pytest
import ray
from ray_jobs import make_trainer

from hetjax.runtime.workers import waiting
from hetjax.runtime.workers.waiting import Awaited


def test_what_is_awaited_is_said_once_and_not_at_once(monkeypatch: pytest.MonkeyPatch):
    said: list[str] = []
    awaited = Awaited(120.0, said.append)
    awaited.tell("a worker at 10.0.0.2")
    assert not said
    assert 0 < awaited.silence <= waiting.TELL_SECONDS
    monkeypatch.setattr(waiting, "TELL_SECONDS", 0.0)
    assert awaited.silence == 0
    for _ in range(2):
        awaited.tell("a worker at 10.0.0.2")
    (line,) = said
    assert line.startswith("waiting for a worker at 10.0.0.2: 0 s of at most 120; a closed port")


def test_it_is_said_by_hetjaxs_logger(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(waiting, "TELL_SECONDS", 0.0)
    Awaited(5.0).tell("b")
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("hetjax", logging.WARNING)


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
def test_workers_that_are_awaited_are_said_with_the_nodes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(waiting, "TELL_SECONDS", 0.0)
    with make_trainer("ray") as trainer:
        trainer.train_step()
    first = caplog.records[0].getMessage()
    address = ray.util.get_node_ip_address()
    assert re.match(
        rf"waiting for stage 0, host 0, stage 1, host 0 to start, on one of {address}: \d+ s of at "
        rf"most 120; this machine, the only one, is busy$",
        first,
    )
