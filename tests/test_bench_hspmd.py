"""The benchmark of HSPMD keeps its bounds; what switches hold is in tests/runtime."""

import json

import pytest
from bench_hspmd import main


def test_what_a_switch_sends_is_within_its_bounds(capsys: pytest.CaptureFixture[str]):
    main(["switch", "--json"])
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert len(rows) == 8
    for row in rows:
        (figure,) = (row[key] for key in ("bytes", "seconds", "devices") if key in row)
        if row["case"].endswith("(just)"):
            assert figure == row["bound"], row
        else:
            assert figure <= row["bound"], row


def test_a_part_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main(["swich"])
    assert "there is no part 'swich'; there are switch, " in capsys.readouterr().err
