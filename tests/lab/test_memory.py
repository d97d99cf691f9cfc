"""A host of a real lab whose memory is limited."""

import signal
import sys

import pytest
from lab import Lab
from lab.memory_groups import find_memory_groups
from labs import MARKS, NOTHING, named_lab, traces

from hetjax.errors import InputError

SPECIFICATION = named_lab("two_hosts")

pytestmark = MARKS


@pytest.mark.skipif(find_memory_groups() is None, reason="no cgroups limit memory here")
def test_a_host_has_no_more_memory_than_it_may():
    first, second = SPECIFICATION.hosts
    second = second.model_copy(update={"memory": 8e8})
    small = SPECIFICATION.model_copy(update={"hosts": [first, second]})
    with Lab.up(small, lifetime=1200) as lab:
        assert 0 < lab.most_memory("b") < 8e8
        for size, wanted in ((10**8, 0), (10**9, -signal.SIGKILL)):
            program = f"print(len(bytearray({size})))"
            done = lab.run("b", [sys.executable, "-c", program], timeout=60, capture_output=True)
            assert done.returncode == wanted
            done = lab.run("a", [sys.executable, "-c", program], timeout=60, capture_output=True)
            assert done.returncode == 0
        assert lab.most_memory("b") > 7e8
        with pytest.raises(InputError, match="host 'a' has no limit of its memory"):
            lab.most_memory("a")
    assert traces() == NOTHING
