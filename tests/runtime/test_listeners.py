"""What the processes of a run listen on, beside docs/security.md; and that they end with it."""

import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from ray_jobs import make_plan, make_trainer

from hetjax.processes import descendants, is_running

pytestmark = pytest.mark.ray

ROOT = Path(__file__).parents[2]
RUN = "--runtime ray --ray-address local --gin train.steps=100000".split()


def table_rows() -> list[list[str]]:
    """The processes that each row of the page's table names."""
    page = (ROOT / "docs/security.md").read_text()
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    return [re.findall(r"`([^`]+)`", row) for row in rows]


def command_line(process: int) -> str:
    return Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ").decode()


def listening(processes: set[int]) -> list[tuple[int, str]]:
    """Processes and the addresses that they listen on."""
    sockets = subprocess.run(["ss", "-tlnupH"], capture_output=True, text=True, check=True).stdout
    found = []
    for line in sockets.splitlines():
        owners = {int(each) for each in re.findall(r"pid=(\d+)", line)} & processes
        found += [(owner, line.split()[4]) for owner in owners]
    return found


@pytest.mark.skipif(shutil.which("ss") is None, reason="it asks iproute2's ss")
def test_every_listener_of_a_run_is_in_the_table_and_a_killed_driver_leaves_nothing(tmp_path: Path):
    command = [sys.executable, "-m", "hetjax.train", "--config", "configs/quickstart.gin", *RUN]
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=ROOT,
        env={**environment, "HOME": str(tmp_path)},
    ) as process:
        assert process.stdout is not None
        assert any(line.startswith("step 10/") for line in process.stdout)
        started = descendants(process.pid)
        processes = {process.pid, *(each.number for each in started)}
        known = [name for names in table_rows() for name in names]
        found = listening(processes)
        for owner, address in found:
            line = command_line(owner)
            assert any(name in line for name in known), f"{line} listens on {address}"
        workers = [owner for owner, _ in found if "HostWorker" in command_line(owner)]
        assert len(workers) >= 2
        # Ray's own server, and no longer those of transfers.
        assert len(set(workers)) == len(workers), found
        token = tmp_path / ".ray/auth_token"
        assert token.exists(), "a cluster that is started here has a token"
        process.send_signal(signal.SIGKILL)
        process.wait()
    end = time.monotonic() + 30
    while left := [each for each in started if is_running(each)]:
        assert time.monotonic() < end, [command_line(each.number) for each in left]
        time.sleep(0.2)


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.skipif(shutil.which("ss") is None, reason="it asks iproute2's ss")
def test_the_hosts_of_a_stage_listen_for_each_other_where_the_table_says():
    """On one machine: Ray's own server in each worker, and `jax.distributed` on loopback."""
    with make_trainer("ray", make_plan(hosts=2)) as trainer:
        trainer.train_step()
        processes = {each.number for each in descendants(os.getpid())}
        found = listening({each for each in processes if "HostWorker" in command_line(each)})
    everywhere = [owner for owner, address in found if address.startswith("*:")]
    assert len(everywhere) == len(set(everywhere)) == 3, found
    loopback = [
        owner for owner, address in found if re.match(r"\[?(::ffff:)?127\.0\.0\.1", address)
    ]
    # The first host of the stage has the coordinator's port besides; the other stage has none.
    assert sorted(Counter(loopback).values()) == [1, 2], found
    assert len(found) == 6, found


def test_a_token_is_made_where_there_is_none(tmp_path: Path):
    """The commands of the page, in an empty home; then `ray start` says that it uses the token."""
    ray = str(Path(sys.executable).parent / "ray")
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment = {**kept, "HOME": str(tmp_path)}
    subprocess.run(
        [ray, "get-auth-token", "--generate"], env=environment, check=True, capture_output=True
    )
    token = tmp_path / ".ray/auth_token"
    assert token.read_text().strip()
    assert stat.S_ISREG(token.stat().st_mode)
    check = (
        "from ray._raylet import AuthenticationMode, get_authentication_mode\n"
        "from ray._private.authentication.authentication_token_setup import "
        "ensure_token_if_auth_enabled\n"
        "ensure_token_if_auth_enabled(create_token_if_missing=False)\n"
        "print(get_authentication_mode() == AuthenticationMode.TOKEN)\n"
    )
    for home, code in ((tmp_path, 0), (tmp_path / "none", 1)):
        home.mkdir(exist_ok=True)
        done = subprocess.run(
            [sys.executable, "-c", check],
            env={**environment, "HOME": str(home), "RAY_AUTH_MODE": "token"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == code, done.stderr
        assert (done.stdout == "True\n") == (code == 0)
