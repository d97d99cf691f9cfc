"""What is looked at in a run's work folder before anything heavy is done."""

import os
from pathlib import Path

import pytest

from hetjax.commands.work_folder import Resumption, check_work_folder
from hetjax.errors import InputError

STARTING = Resumption(wanted=True, or_start=True)


def test_a_pipe_in_the_place_of_the_metrics_is_not_waited_for(tmp_path: Path):
    os.mkfifo(tmp_path / "metrics.jsonl")
    with pytest.raises(InputError, match=r"metrics.jsonl cannot be read: it is a pipe, not"):
        check_work_folder(tmp_path, STARTING)
