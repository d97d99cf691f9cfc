"""Metrics: every step once, whole lines only, the same figures in TensorBoard."""

import importlib
import json
import os
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetjax.errors import InputError
from hetjax.report.metrics import METRICS_FILE, TENSORBOARD_FOLDER, MetricsWriter, read_metrics


def write_steps(workdir: Path, steps: range, first_step: int = 0, loss: float = 1.0) -> None:
    with MetricsWriter(workdir, first_step=first_step) as metrics:
        for step in steps:
            metrics.write(step, {"loss": loss, "step_time": 0.5})


def tensorboard_scalars(workdir: Path) -> list[tuple[int, str, float]]:
    """Every scalar in the event files of a work folder, read record by record."""
    # The generated module names its classes at run time, where no type checker sees them.
    event_type = importlib.import_module("tensorboardX.proto.event_pb2").Event
    scalars = []
    for path in sorted((workdir / TENSORBOARD_FOLDER).iterdir()):
        data, at = path.read_bytes(), 0
        while at < len(data):
            length = int.from_bytes(data[at : at + 8], "little")
            event = event_type.FromString(data[at + 12 : at + 12 + length])
            scalars += [(event.step, v.tag, v.simple_value) for v in event.summary.value]
            at += 12 + length + 4
    return scalars


def test_a_line_is_in_the_file_as_soon_as_it_is_written(tmp_path: Path):
    with MetricsWriter(tmp_path) as metrics:
        metrics.write(1, {"loss": 2.5, "eval_loss": 3.0})
        text = (tmp_path / METRICS_FILE).read_text()
    assert text == '{"step": 1, "loss": 2.5, "eval_loss": 3.0}\n'


def test_scalars_of_any_library_become_json_numbers(tmp_path: Path):
    with MetricsWriter(tmp_path) as metrics:
        metrics.write(1, {"a": np.float32(0.5), "b": jnp.float32(1.5), "c": np.int64(3), "d": 4})
    assert read_metrics(tmp_path) == [{"step": 1, "a": 0.5, "b": 1.5, "c": 3, "d": 4}]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_null(tmp_path: Path, value: float):
    with MetricsWriter(tmp_path) as metrics:
        metrics.write(1, {"loss": value})
    assert json.loads((tmp_path / METRICS_FILE).read_text()) == {"step": 1, "loss": None}


def test_whole_numbers_of_any_size_are_read_back(tmp_path: Path):
    with MetricsWriter(tmp_path) as metrics:
        metrics.write(1, {"a": 2**63 - 1, "b": 10**40, "c": 2**2000})
    assert read_metrics(tmp_path) == [{"step": 1, "a": 2**63 - 1, "b": 1e40, "c": None}]


@pytest.mark.parametrize("damaged", ["9" * 5000, "[" * 100_000, '{"step": 2, "lo', '"\\ud800'])
def test_lines_that_are_no_record_are_left_out(tmp_path: Path, damaged: str):
    write_steps(tmp_path, range(1, 3))
    with (tmp_path / METRICS_FILE).open("a") as file:
        file.write(f'{{"step": 3, "loss": {damaged}}}\n{damaged}\n')
    assert [record["step"] for record in read_metrics(tmp_path)] == [1, 2]
    write_steps(tmp_path, range(3, 5), first_step=3)
    assert [record["step"] for record in read_metrics(tmp_path)] == [1, 2, 3, 4]


def test_a_run_that_resumes_takes_back_later_steps(tmp_path: Path):
    write_steps(tmp_path, range(1, 8), loss=1.0)
    write_steps(tmp_path, range(5, 10), first_step=5, loss=2.0)
    records = read_metrics(tmp_path)
    assert [record["step"] for record in records] == list(range(1, 10))
    assert [record["loss"] for record in records] == [1.0] * 4 + [2.0] * 5


def test_a_run_that_starts_afresh_takes_back_all(tmp_path: Path):
    write_steps(tmp_path, range(1, 8))
    write_steps(tmp_path, range(1, 3))
    assert [record["step"] for record in read_metrics(tmp_path)] == [1, 2]


@given(cut=st.integers(1, 40), first_step=st.integers(1, 6))
def test_no_half_written_line_survives(
    tmp_path_factory: pytest.TempPathFactory, cut: int, first_step: int
):
    workdir = tmp_path_factory.mktemp("metrics")
    write_steps(workdir, range(1, 6))
    path = workdir / METRICS_FILE
    path.write_bytes(path.read_bytes()[:-cut])
    write_steps(workdir, range(first_step, 8), first_step=first_step)
    steps = [json.loads(line)["step"] for line in path.read_text().splitlines()]
    assert len(set(steps)) == len(steps)
    assert steps[-1] == 7
    assert steps == sorted(steps)


def test_a_line_that_was_cut_off_meanwhile_takes_no_other_with_it(tmp_path: Path):
    with MetricsWriter(tmp_path) as metrics:
        metrics.write(1, {"loss": 1.0})
        metrics.write(2, {"loss": 2.0})
        path = tmp_path / METRICS_FILE
        path.write_bytes(path.read_bytes()[:-5])
        metrics.write(3, {"loss": 3.0})
    assert [record["step"] for record in read_metrics(tmp_path)] == [1, 3]


def test_tensorboard_holds_the_same_figures(tmp_path: Path):
    write_steps(tmp_path, range(1, 3), loss=1.5)
    assert tensorboard_scalars(tmp_path) == [
        (1, "loss", 1.5),
        (1, "step_time", 0.5),
        (2, "loss", 1.5),
        (2, "step_time", 0.5),
    ]


def test_closing_twice_is_harmless(tmp_path: Path):
    metrics = MetricsWriter(tmp_path)
    metrics.close()
    metrics.close()


def test_a_work_folder_without_metrics_reads_as_none(tmp_path: Path):
    assert read_metrics(tmp_path) == []


def test_a_pipe_is_not_waited_for(tmp_path: Path):
    os.mkfifo(tmp_path / METRICS_FILE)
    for read in (read_metrics, lambda workdir: MetricsWriter(workdir, first_step=2)):
        with pytest.raises(InputError, match=r"metrics.jsonl cannot be read: it is a pipe, not"):
            read(tmp_path)
