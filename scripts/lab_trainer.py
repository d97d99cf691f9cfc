"""Trainers in the lab that do what a benchmark or a test asks, one thing at a time.

The trainers are in one process on the lab's first host, which this script is; `LabTrainers` starts
it and asks, and answers come when what was asked is done.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

import jax
from baselines import model_of, optimizer
from benchmarking import (
    KEPT_MEMORY,
    SCRIPTS,
    Child,
    RequestServer,
    Size,
    add_size,
    serve_until_end,
    size_flags,
    size_of,
)
from images_trainer import ImageSize, ImagesTrainer, with_memory
from lab import Lab, Specification
from moves_trainer import MovesTrainer

import hetjax
from hetjax.errors import WorkerLostError
from hetjax.mesh import SubMesh
from hetjax.pipeline.program.tracing import trace
from hetjax.pipeline.schedules.warm_up import one_f_one_b
from hetjax.pipeline.timeline.measured_times import measured_times
from hetjax.pipeline.timeline.overlap import overlap
from hetjax.pipeline.timeline.timeline import Timeline, link_track, stage_track
from hetjax.planner import (
    Member,
    PipelinePlan,
    PlanOptions,
    Shares,
    StagePlan,
    choose_schedule,
    make_problem,
    reschedule,
    solve,
)
from hetjax.planner.work.stage_work import measure
from hetjax.runtime import RayOptions, measure_cluster
from hetjax.runtime.ray.ray_executor import RayExecutor, connect_to_ray

CLUSTERS = SCRIPTS.parent / "configs" / "lab" / "clusters"
ANSWER_SECONDS = 1200.0


@dataclass
class Hosts:
    """The benchmark's side of the lab.

    Args:
        lab: the lab.
        size: sizes of model and batch.
        ends: what ends the processes.
    """

    lab: Lab
    size: Size
    ends: contextlib.ExitStack

    @property
    def names(self) -> list[str]:
        """The hosts, in order."""
        return [host.name for host in self.lab.specification.hosts]

    def child(self, host: int, script: str, flags: Sequence[str], **variables: str) -> Child:
        """A process on a host."""
        environment = {**self.lab.environment(), **variables}
        child = Child(
            script, flags, environment, lambda command: self.lab.command(self.names[host], command)
        )
        return self.ends.enter_context(contextlib.closing(child))

    def set_rate(self, rate: float | None) -> None:
        """Limit the first link to bytes/s, or not at all."""
        self.lab.set_link(self.lab.specification.links[0].name, rate)


class LabTrainers:
    """The trainers in the lab.

    Args:
        hosts: the lab.
    """

    def __init__(self, hosts: Hosts):
        self._child = hosts.child(0, "lab_trainer.py", size_flags(hosts.size), **KEPT_MEMORY)

    def __call__(self, do: str, of: str = "", **arguments: Any) -> Any:
        """Have something done.

        Args:
            do: a method of `Server`, or of `PipelineTrainer`, without its ``do_``.
            of: the name of a trainer, where there are several.
            arguments: the method's.

        Returns:
            What it returned.
        """
        self.begin(do, of, **arguments)
        return self.end()

    def begin(self, do: str, of: str = "", **arguments: Any) -> None:
        """Begin what `__call__` does; `end` waits for its answer."""
        self._child.ask({"do": do, "of": of, **arguments})

    def end(self, deadline: float = ANSWER_SECONDS) -> Any:
        """Wait for the answer to what was begun.

        Args:
            deadline: seconds to wait at most.
        """
        return self._child.answer(deadline)


@contextlib.contextmanager
def trainers(
    lab: Specification, size: Size, change: Callable[[Lab], None] = lambda _: None
) -> Iterator[tuple[Hosts, LabTrainers]]:
    """A lab, and the process on its first host that trains; both end with the block.

    Args:
        lab: what it consists of.
        size: sizes of model and batch.
        change: what to change of the lab before.
    """
    with contextlib.ExitStack() as ends:
        hosts = Hosts(ends.enter_context(Lab.up(lab)), size, ends)
        change(hosts.lab)
        yield hosts, LabTrainers(hosts)


class Server(RequestServer):
    """What is asked of the process on the first host.

    Args:
        size: sizes of model and batch.
    """

    def __init__(self, size: Size):
        self.size = size
        self.cluster: hetjax.Cluster | None = None
        self.trainers: dict[str, PipelineTrainer | UnionTrainer | MovesTrainer | ImagesTrainer] = {}
        connect_to_ray(RayOptions())

    def answer(self, request: Mapping[str, Any]) -> Any:
        """Do what is asked, by the method that the request names."""
        arguments = {name: value for name, value in request.items() if name not in ("do", "of")}
        method, of = f"do_{request['do']}", request["of"]
        if hasattr(self, method):
            return getattr(self, method)(of, **arguments)
        return getattr(self.trainers[of], method)(**arguments)

    def do_measure_cluster(self, of: str) -> list[dict[str, Any]]:
        """Measure the lab, for the trainers to come; what was found of each host."""
        del of
        self.cluster = measure_cluster()
        return [
            {"name": each.name, "flops": each.kind.flops("float32")}
            for each in self.cluster.subclusters
        ]

    def do_make(self, of: str, cluster: str | None = None, **options: Any) -> list[dict[str, Any]]:
        """Make a trainer.

        Args:
            of: its name.
            cluster: the file of its cluster; None for the one that was measured.
            options: what else `PipelineTrainer` takes.

        Returns:
            Its stages; see `PipelineTrainer.stages`.
        """
        found = hetjax.Cluster.from_file(cluster) if cluster else self.cluster
        assert found is not None, "the cluster must be measured, or its file given"
        self.trainers[of] = trainer = PipelineTrainer(self.size, found, **options)
        return trainer.stages()

    def do_make_union(self, of: str, *, even: bool) -> list[int]:
        """Make a trainer of one data-parallel stage over all hosts.

        Args:
            of: its name.
            even: whether all hosts have equally many examples, whatever their speeds.

        Returns:
            How many examples of a microbatch each host has.
        """
        assert self.cluster is not None, "the cluster must be measured"
        self.trainers[of] = trainer = UnionTrainer(self.size, self.cluster, even=even)
        return trainer.shares

    def do_make_moves(self, of: str) -> float:
        """Make a trainer of one stage over two hosts, with moves in every block.

        Args:
            of: its name.

        Returns:
            The rate of the link between the hosts in bytes/s, as it was measured.
        """
        assert self.cluster is not None, "the cluster must be measured"
        self.trainers[of] = MovesTrainer(self.size, self.cluster, hetjax.RayOptions())
        names = (each.name for each in self.cluster.subclusters[:2])
        return self.cluster.link(*names).bandwidth

    def do_make_images(
        self,
        of: str,
        *,
        size: Mapping[str, Any],
        even: bool = False,
        memory: Mapping[str, float] | None = None,
        cluster: str | None = None,
    ) -> dict[str, Any]:
        """Make a trainer of a ResNet by the plan that the planner makes by default.

        Args:
            of: its name.
            size: the fields of its `ImageSize`.
            even: whether all hosts have equally many examples instead.
            memory: bytes that a host has, of some.
            cluster: the file of its cluster; None for the one that was measured.

        Returns:
            Its plan in a few words; see `ImagesTrainer.told`.
        """
        found = hetjax.Cluster.from_file(cluster) if cluster else self.cluster
        assert found is not None, "the cluster must be measured, or its file given"
        found = with_memory(found, memory or {})
        self.trainers[of] = trainer = ImagesTrainer(ImageSize(**size), found, even=even)
        return trainer.told()

    def do_end(self, of: str) -> None:
        """End a trainer."""
        self.trainers.pop(of).trainer.close()

    def close(self) -> None:
        """End all trainers."""
        for trainer in self.trainers.values():
            trainer.trainer.close()


class UnionTrainer:
    """The GPT in training in one stage over all hosts of the lab, each with a share of the batch.

    Args:
        size: sizes of model and batch.
        cluster: the cluster.
        even: whether all hosts have equally many examples; else in proportion to their speeds.

    Attributes:
        shares: how many examples of a microbatch each host has.
    """

    def __init__(self, size: Size, cluster: hetjax.Cluster, *, even: bool):
        model = model_of(size)
        self.batch = {"tokens": size.tokens()}
        parameters = jax.jit(model.init)(jax.random.key(0))
        flops = [each.kind.flops("float32") for each in cluster.subclusters]
        weights = [1.0] * len(flops) if even else flops
        ends = [
            round(size.microbatch_size * end / sum(weights))
            for end in itertools.accumulate(weights, initial=0.0)
        ]
        self.shares = [stop - start for start, stop in itertools.pairwise(ends)]
        one = {"tokens": self.batch["tokens"][: size.microbatch_size]}
        program = trace(model.loss, parameters, one)
        members = tuple(
            Member(SubMesh(each.name, 0, (1, 1)), (1, 1)) for each in cluster.subclusters
        )
        stage = StagePlan((0, 1), members, shares=Shares(batch=tuple(self.shares)))
        count = size.microbatches
        pipeline = PipelinePlan((stage,), count, size.microbatch_size, one_f_one_b(1, count))
        layers = (0, program.num_positions)
        plan = hetjax.Plan(program.fingerprint, layers, cluster, (pipeline,))
        self.trainer = hetjax.Trainer(
            plan, model.loss, parameters, optimizer(), self.batch, runtime=hetjax.RayOptions()
        )

    def do_steps(self, count: int) -> list[float]:
        """Run steps; their losses."""
        return [self.trainer.train_step(self.batch).loss for _ in range(count)]

    def do_step(self) -> float:
        """Run one step; its seconds."""
        return self.trainer.train_step(self.batch).seconds


class PipelineTrainer:
    """The GPT in training on all hosts of the lab.

    Args:
        size: sizes of model and batch.
        cluster: the cluster.
        num_stages: how many stages the plan has.
        even: plan as if all hosts were like the first.
        workdir: where checkpoints go; None for no checkpoints.
    """

    def __init__(
        self,
        size: Size,
        cluster: hetjax.Cluster,
        num_stages: int = 2,
        even: bool = False,
        workdir: str | None = None,
    ):
        model = model_of(size)
        self.batch = {"tokens": size.tokens()}
        parameters = jax.jit(model.init)(jax.random.key(0))
        problem = make_problem(
            model.loss,
            parameters,
            self.batch,
            cluster=_even(cluster) if even else cluster,
            optimizer=optimizer(),
            num_microbatches=size.microbatches,
            options=PlanOptions(
                schedule="1f1b",
                allow_recompute=False,
                min_stages=num_stages,
                max_stages=num_stages,
                max_pipelines=1,
                union_stages=False,
            ),
        )
        plan = replace(solve(problem), cluster=cluster)
        self.plan = plan
        self.works = measure(problem.program, plan.boundaries(plan.pipeline))
        self.arguments = (model.loss, parameters, optimizer(), self.batch)
        self.options: dict[str, Any] = {"runtime": hetjax.RayOptions(), "workdir": workdir}
        self.trainer = hetjax.Trainer(plan, *self.arguments, **self.options)

    def stages(self) -> list[dict[str, Any]]:
        """Each stage's host, its work in FLOPs of a microbatch, and its host's FLOP/s."""
        plan = self.trainer.plan
        return [
            {
                "host": stage.submesh.subcluster,
                "layers": stage.layers,
                "work": work.forward.flops + work.backward.flops,
                "flops": plan.cluster.subcluster(stage.submesh.subcluster).kind.flops("float32"),
            }
            for stage, work in zip(plan.pipeline.stages, self.works, strict=True)
        ]

    def do_steps(self, count: int) -> list[float]:
        """Run steps; their losses."""
        return [self.trainer.train_step(self.batch).loss for _ in range(count)]

    def do_step(self, plan: str) -> float:
        """Run one step by a plan that was made before; its seconds."""
        self.trainer.use_schedule(self.plans[plan].pipeline.schedule)
        return self.trainer.train_step(self.batch).seconds

    def do_measure(self, rounds: int) -> dict[str, Any]:
        """Time tasks and transfers; their seconds, and the bytes of an activation."""
        times = self.trainer.measure(self.batch, rounds=rounds)
        events = self.trainer.timeline().on(link_track(0, 1))
        self.times = times
        return {"times": asdict(times), "num_bytes": max(event.num_bytes for event in events)}

    def do_plan(self, schedules: Sequence[str]) -> None:
        """Make schedules of the measured times.

        Each is made twice, as `train.tune` does: of times by 1F1B, and by the schedule that came of
        them.
        """
        self.plans = {name: self._tuned(name) for name in schedules}
        self.timed: dict[str, list[Timeline]] = {name: [] for name in schedules}

    def _tuned(self, name: str) -> hetjax.Plan:
        self.trainer.use_plan(choose_schedule(self.plan, name, self.times))
        times = self.trainer.measure(self.batch, rounds=1, known=self.times)
        return choose_schedule(self.plan, name, times)

    def do_timed_step(self, plan: str) -> float:
        """Run one timed step by a plan that was made before, and keep its timeline; its seconds."""
        self.trainer.use_schedule(self.plans[plan].pipeline.schedule)
        metrics = self.trainer.train_step(self.batch, timed=True)
        self.timed[plan].append(self.trainer.timeline())
        return metrics.seconds

    def do_figures(self, plan: str) -> dict[str, Any]:
        """What the timed steps by a plan tell.

        Returns:
            The step time that is predicted of what tasks and transfers took, and its lower
            bound; the most live microbatches of each stage; the part of the link's time that
            computation hid, in the median step, of that direction of which less was hidden.
        """
        schedule = self.plans[plan].pipeline.schedule
        times = measured_times([(each, schedule) for each in self.timed[plan]], self.times)
        prediction = reschedule(self.plans[plan], schedule, times).predicted
        hidden = [min(overlap(each).values(), default=0.0) for each in self.timed[plan]]
        return {
            "predicted_step_time": prediction.step_time,
            "lower_bound": prediction.lower_bound,
            "live": [schedule.live_bound(stage) for stage in range(schedule.num_stages)],
            "overlap": median(hidden),
        }

    def do_busy(self, plan: str) -> list[float]:
        """Run one timed step by a plan; each stage's seconds of computation."""
        self.do_timed_step(plan)
        timeline = self.timed[plan][-1]
        return [timeline.busy(stage_track(stage)) for stage in range(len(self.works))]

    def do_switch(self, share: float) -> dict[str, Any]:
        """Switch to a plan whose first stage has a share of the layers.

        Returns:
            The seconds of the parts of the switch, and of all; the bytes that the busiest host
            sends another one.
        """
        began = time.perf_counter()
        moved = self.trainer.switch(self._cut_at(share))
        seconds = time.perf_counter() - began
        executor = self.trainer._executor
        assert isinstance(executor, RayExecutor)
        sent = moved.bytes_sent().values()
        return {
            **executor.switch_seconds,
            "move": executor.moving_seconds(),
            "all": seconds,
            "bytes": max(sent, default=0),
        }

    def do_save_and_restore(self, share: float) -> dict[str, float]:
        """Save, end the trainer, and restore in one of another plan.

        Returns:
            The seconds of saving and restoring, and of all.
        """
        began = time.perf_counter()
        self.trainer.save(wait=True)
        saved = time.perf_counter()
        self.trainer.close()
        self.trainer = hetjax.Trainer(self._cut_at(share), *self.arguments, **self.options)
        started = time.perf_counter()
        self.trainer.resume()
        ended = time.perf_counter()
        return {"save": saved - began, "restore": ended - started, "all": ended - began}

    def _cut_at(self, share: float) -> hetjax.Plan:
        """The plan with its two stages cut after a share of the layers."""
        plan = self.trainer.plan
        last = len(plan.layers) - 1
        cut = min(max(1, round(share * last)), last - 1)
        pipeline = plan.pipeline
        first, second = pipeline.stages
        stages = (replace(first, layers=(0, cut)), replace(second, layers=(cut, last)))
        return replace(plan, pipelines=(replace(pipeline, stages=stages),), prediction=None)

    def do_until_lost(self) -> dict[str, Any]:
        """Train until a worker is lost; which, and when that was raised and the trainer ended.

        The moments are those of the monotonic clock, which is the same for all processes.
        """
        try:
            while True:
                self.trainer.train_step(self.batch)
        except WorkerLostError as error:
            lost = {"worker": error.worker, "message": str(error), "lost": time.monotonic()}
        self.trainer.close()
        return {**lost, "ended": time.monotonic()}


def _even(cluster: hetjax.Cluster) -> hetjax.Cluster:
    """A cluster whose devices all are what the first ones are."""
    kind = cluster.subclusters[0].kind
    return replace(
        cluster, subclusters=tuple(replace(each, kind=kind) for each in cluster.subclusters)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_size(parser)
    serve_until_end(Server(size_of(parser.parse_args())))


if __name__ == "__main__":
    main()
