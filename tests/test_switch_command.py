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


def test_min_rank_goes_between_nodes_and_fused_stays_in_them(
    capsys: pytest.CaptureFixture[str],
):
    figures = switched(capsys, "--bytes-per-parameter", "6")
    volumes = figures["volumes"]
    totals = {
        policy: {key: sum(row[key] for row in rows.values()) for key in rows["8"]}
        for policy, rows in volumes.items()
    }
    assert {sum(each.values()) for each in totals.values()} == {figures["total_bytes"]}
    assert figures["total_bytes"] > 48e9
    # The lowest devices that hold a slice are those of the first two nodes, whoever wants it.
    assert totals["min_rank"]["intra_node"] == 0
    assert [int(device) for device in volumes["min_rank"]] == list(range(4, 16))
    assert totals["fused"]["inter_node"] <= 0.4 * totals["min_rank"]["inter_node"]
    assert all("31" not in rows for rows in volumes.values())
    assert figures["plan_seconds"] > 0


def test_fused_loads_are_as_level_as_they_can_be(capsys: pytest.CaptureFixture[str]):
    figures = switched(capsys, "--bytes-per-parameter", "6")
    fused, alone = figures["volumes"]["fused"], figures["volumes"]["min_rank"]
    # What device 31 had of layers 48 to 59 only device 15 has, and all else is shared.
    assert figures["busiest"]["fused"] == fused["15"]["inter_node"] == alone["15"]["inter_node"]
    # Devices of two nodes hold layers 45 to 47, and share what the lowest would send alone.
    shared = [fused[str(device)]["inter_node"] for device in (8, 9, 10, 11, 24, 25, 26, 27)]
    assert max(shared) < 1.001 * min(shared)
    lowest = [alone[str(device)]["inter_node"] for device in range(8, 12)]
    assert sum(shared) == pytest.approx(sum(lowest), rel=1e-3)


def test_a_plan_file_says_itself_what_is_lost(capsys: pytest.CaptureFixture[str]):
    said = switched(capsys, "--bytes-per-parameter", "6")
    assert "31" not in said["volumes"]["fused"]
    named = switched(capsys, "--lost", "31", "--bytes-per-parameter", "6")
    assert named["volumes"] == said["volumes"]


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
        (["--from", "c1.json", "--to", "c2.json", "--lost", "99"], "--lost: [99] are no devices"),
        (["--lost", "1", "-1"], "--lost: '-1' is no device's number, 0 or more"),
        (
            ["--from", "c1.json", "--to", "c2.json", "--lost", "99", "--lost", "0"],
            "[99] are no dev",
        ),
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


def test_plans_for_batches_of_two_sizes_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    plan = json.loads((HETU / "c2.json").read_text())
    for pipeline in plan["pipelines"]:
        pipeline["microbatch_size"] *= 2
    (tmp_path / "larger.json").write_text(json.dumps(plan))
    plans = ["--from", str(HETU / "c1.json"), "--to", str(tmp_path / "larger.json")]
    assert main(["--config", CONFIG, *plans]) == 2
    assert "the plans are for batches of" in capsys.readouterr().err
