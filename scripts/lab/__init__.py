"""The lab: a cluster of unlike hosts on one Linux machine, for tests and measurements.

    python scripts/lab up two_hosts
    python scripts/lab train --config configs/lab/two_hosts.gin
    python scripts/lab down

Every host is a network namespace of its own with a CPU quota and a Ray node; the links between them
are throttled. Nothing is routed to the outside.
"""

from lab.lab import HostStatus, Lab, LinkStatus
from lab.specification import Host, Link, Specification, parse_rate, read_specification
from lab.system import LabError

__all__ = [
    "Host",
    "HostStatus",
    "Lab",
    "LabError",
    "Link",
    "LinkStatus",
    "Specification",
    "parse_rate",
    "read_specification",
]
