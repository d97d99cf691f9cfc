"""What a driver runs for its cluster ends with it, or when it is no longer needed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from hetjax.processes import descendants, ending_with_this_process, is_running

SLEEPING = "import time; print(flush=True); time.sleep(60)"
PARENT = f"""
import os, subprocess, sys, time
worker = [sys.executable, "-c", {SLEEPING!r}]
environment = {{**os.environ, "RAY_RAYLET_PID": str(os.getpid())}}
process = subprocess.Popen(worker, env=environment, stdout=subprocess.PIPE)
process.stdout.readline()
print(process.pid, flush=True)
time.sleep(60)
"""


def start(*command: str) -> tuple[subprocess.Popen, str]:
    """A process of Python, and the line that it says."""
    process = subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout as said:
        return process, said.readline()


def test_a_guard_that_is_dismissed_ends_the_cluster_and_itself(tmp_path: Path):
    before = set(descendants(os.getpid()))
    descriptors = len(os.listdir("/proc/self/fd"))
    program = tmp_path / "program.py"
    program.write_text(PARENT)
    with ending_with_this_process(tmp_path) as guard:
        cluster, worker = start(str(program))
        other, _ = start("-c", SLEEPING)
    started = set(descendants(os.getpid())) - before
    numbers = {each.number for each in started}
    assert numbers >= {guard.process, cluster.pid, other.pid, int(worker)}
    # What is left of a cluster has other parents.
    cluster.kill()
    cluster.wait(30)
    guard.dismiss()
    end = time.monotonic() + 30
    while any(is_running(each) for each in started if each.number != other.pid):
        assert time.monotonic() < end, "the guard or the worker is left behind"
        time.sleep(0.02)
    assert other.poll() is None
    other.kill()
    assert other.wait(30) == -signal.SIGKILL
    assert len(os.listdir("/proc/self/fd")) == descriptors
