"""The processes between which arrays move: who they are, and which devices each has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hetjax.planner.plan.plan import Plan
from hetjax.planner.plan.stage_plan import Member

Peer = tuple[int, int]
"""A process: its stage, and its place among the stage's processes, counted through all members.

A process of the Ray runtime has all stages on its devices; it is called by the first of them.
"""

Processes = Sequence[Sequence[tuple[int, ...]]]
"""For each stage, for each of its processes, the cluster's numbers of its devices.

No process has devices of two members. In the local runtime each member counts as one.
"""


@dataclass(frozen=True)
class WorkerProcess:
    """A process of the Ray runtime: one host of a member of a stage, or of stages that share it.

    Args:
        peer: who it is.
        place: which member of its stage it belongs to.
        member: that member.
        host: which host of the member it is.
        devices: the cluster's numbers of its devices.
        num_members: how many members its stage has.
        stages: its stages.
    """

    peer: Peer
    place: int
    member: Member
    host: int
    devices: tuple[int, ...]
    num_members: int
    stages: tuple[int, ...]

    @property
    def name(self) -> str:
        """What the worker is called in messages."""
        stage, _ = self.peer
        if len(self.stages) > 1:
            return f"stages {' and '.join(map(str, self.stages))}, host {self.host}"
        if self.num_members == 1:
            return f"stage {stage}, host {self.host}"
        host = f", host {self.host}" if self.num_hosts > 1 else ""
        return f"stage {stage}, member {self.place}{host}"

    @property
    def num_hosts(self) -> int:
        """How many hosts the member spans."""
        return self.member.submesh.shape[0]


def processes_of(plan: Plan) -> dict[Peer, WorkerProcess]:
    """The processes of a plan on Ray, stage by stage and member by member."""
    return {
        (stages[0], place): WorkerProcess((stages[0], place), *of, len(members), stages)
        for stages in plan.sharing
        for members in [plan.stages[stages[0]].members]
        for place, of in enumerate(_hosts_of(plan, members))
    }


def _hosts_of(
    plan: Plan, members: Sequence[Member]
) -> Iterator[tuple[int, Member, int, tuple[int, ...]]]:
    for place, member in enumerate(members):
        devices = tuple(plan.cluster.device_ids(member.submesh))
        count = len(devices) // member.submesh.shape[0]
        for host in range(member.submesh.shape[0]):
            yield place, member, host, devices[host * count : (host + 1) * count]


def names_of(plan: Plan) -> dict[Peer, str]:
    """What the processes of a plan on Ray are called in messages."""
    return {peer: process.name for peer, process in processes_of(plan).items()}


def devices_of(processes: dict[Peer, WorkerProcess]) -> Processes:
    """The devices of each process, stage by stage."""
    by_stage: dict[int, list[tuple[int, ...]]] = {}
    for process in processes.values():
        for stage in process.stages:
            by_stage.setdefault(stage, []).append(process.devices)
    return [by_stage[stage] for stage in sorted(by_stage)]


def leads_of(processes: dict[Peer, WorkerProcess]) -> dict[int, int]:
    """For each stage the one by which its processes are called."""
    return {stage: each.peer[0] for each in processes.values() for stage in each.stages}
