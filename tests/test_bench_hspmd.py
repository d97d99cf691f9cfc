"""The benchmark of HSPMD keeps its bounds; what switches hold is in tests/runtime."""

import json

import pytest
from bench_hspmd import main
from hspmd_programs import unify_rows
from hspmd_resolution import cheap_rows


def test_what_a_switch_sends_is_within_its_bounds(capsys: pytest.CaptureFixture[str]):
    main(["switch", "--json"])
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert len(rows) == 8
    for row in rows:
        (figure,) = (row[key] for key in ("bytes", "seconds", "devices") if key in row)
        if "seconds" in row:
            continue  # It says by itself whether the machine was quick enough.
        if row["case"].endswith("(just)"):
            assert figure == row["bound"], row
        else:
            assert figure <= row["bound"], row


def test_a_part_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main(["swich"])
    assert "there is no part 'swich'; there are cheap, " in capsys.readouterr().err


def test_resolution_unions_and_symbols_are_within_their_bounds(
    capsys: pytest.CaptureFixture[str],
) -> None:
    main(["transformer", "shapes", "--json"])
    for row in json.loads(capsys.readouterr().out)["rows"]:
        assert row["bytes"] == row["bound"], row
        assert not row.get("wrong"), row
    for row in cheap_rows(cases=200):
        assert row.get("mean_ratio", 1.0) <= 1.1, row
    for row in unify_rows(cases=20):
        assert row["bytes"] == row["bound"], row
