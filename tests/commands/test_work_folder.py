"""What is looked at in a run's work folder before anything heavy is done."""

import os
from pathlib import Path

import pytest

from hetjax.commands.work_folder import (
    PLAN_FILE,
    Resumption,
    check_work_folder,
    reusable_plan,
    save_configuration,
)
from hetjax.configuration import Configuration, read_configuration
from hetjax.errors import InputError

STARTING = Resumption(wanted=True, or_start=True)


def configured(*bindings: str) -> Configuration:
    return read_configuration(None, bindings)


def test_a_pipe_in_the_place_of_the_metrics_is_not_waited_for(tmp_path: Path):
    os.mkfifo(tmp_path / "metrics.jsonl")
    with pytest.raises(InputError, match=r"metrics.jsonl cannot be read: it is a pipe, not"):
        check_work_folder(tmp_path, STARTING)


def test_a_file_in_the_place_of_a_folder_is_named(tmp_path: Path):
    (tmp_path / "tensorboard").touch()
    with pytest.raises(InputError, match=r"tensorboard is a file, not a folder"):
        check_work_folder(tmp_path, Resumption())


@pytest.mark.parametrize(
    "changed",
    [
        ["data.tokenizer = '/tokenizer.json'"],
        ["data.kind = 'text'", "data.paths = ['/text']"],
        ["optimizer.options = {'b2': 0.9}"],
        ["model.width = 16"],
    ],
    ids=lambda changed: changed[0].split()[0],
)
def test_what_a_plan_depends_on_is_planned_anew(tmp_path: Path, changed: list[str]):
    save_configuration(tmp_path, configured())
    (tmp_path / PLAN_FILE).touch()
    again = configured("train.steps = 9", "data.size = 200")
    assert reusable_plan(tmp_path, again) == tmp_path / PLAN_FILE
    assert reusable_plan(tmp_path, configured(*changed)) is None
