"""What a process has started ends with it, or when it is no longer needed."""

import os
import signal
import subprocess
import sys
import time

from hetjax.processes import descendants, ending_with_this_process, is_running


def test_a_guard_that_is_dismissed_ends_what_is_left_and_itself():
    before = set(descendants(os.getpid()))
    descriptors = len(os.listdir("/proc/self/fd"))
    with ending_with_this_process() as guard:
        sleeping = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    started = set(descendants(os.getpid())) - before
    assert {each.number for each in started} >= {guard.process, sleeping.pid}
    guard.dismiss()
    assert sleeping.wait(30) == -signal.SIGKILL
    end = time.monotonic() + 30
    while any(map(is_running, started)):
        assert time.monotonic() < end, "the guard is left behind"
        time.sleep(0.02)
    assert len(os.listdir("/proc/self/fd")) == descriptors
