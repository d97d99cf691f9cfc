"""``python -m hetjax.switch`` plans on shapes alone what a switch would move."""

import json
from pathlib import Path

import pytest

from hetjax.switch import main

HETU = Path(__file__).parent.parent / "configs" / "papers" / "hetu"
CONFIG = str(HETU / "llama32b.gin")


def switched(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:
    plans = ["--from", str(HETU / "c1.json"), "--to", str(HETU / "c2.json")]
    assert main(["--config", CONFIG, *plans, "--json", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


def test_policies_move_the_same_bytes_and_fused_ones_are_balanced(
    capsys: pytest.CaptureFixture[str],
):
    figures = switched(capsys, "--lost", "31", "--bytes-per-parameter", "2")
    volumes = figures["volumes"]
    totals = {
        policy: {key: sum(row[key] for row in rows.values()) for key in rows["8"]}
        for policy, rows in volumes.items()
    }
    assert totals["fused"] == totals["unfused"] == totals["min_rank"]
    assert sum(totals["fused"].values()) == figures["total_bytes"] > 16e9
    busiest = figures["busiest"]
    assert busiest["fused"] <= busiest["min_rank"]
    # Devices of two nodes hold layers 45 to 47: they share what the lowest would send alone.
    shared = [volumes["fused"][device]["inter_node"] for device in ("8", "24")]
    assert sum(shared) == pytest.approx(volumes["min_rank"]["8"]["inter_node"], rel=1e-2)
    assert max(shared) < 0.6 * sum(shared)
    assert "24" not in volumes["min_rank"]
    assert all("31" not in rows for rows in volumes.values())


def test_parameters_and_optimizer_state_count_as_they_are(capsys: pytest.CaptureFixture[str]):
    alone = switched(capsys, "--bytes-per-parameter", "4")["total_bytes"]
    with_adam = switched(capsys)["total_bytes"]
    assert with_adam == pytest.approx(3 * alone, rel=1e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--to", "c2.json"], "--from is missing"),
        (["--from", "c1.json", "--to", "c4.json"], "the plans are for the clusters"),
        (["--from", "c1.json", "--to", "c2.json", "--lost", "30"], "uses devices [30]"),
        (["--from", "c1.json", "--to", "c2.json", "--lost", "99"], "[99] are no devices"),
        (["--from", "c1.json", "--to", "c2.json", "--bytes-per-parameter", "0"], "1 or more"),
    ],
)
def test_wrong_input_is_one_line(
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
):
    given = [str(HETU / a) if a.endswith(".json") else a for a in arguments]
    assert main(["--config", CONFIG, *given]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
