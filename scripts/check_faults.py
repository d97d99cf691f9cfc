"""Faults at random moments of real runs: what ends them, what is left of them, how they go on.

    python scripts/check_faults.py --tries 10 --seed 0
    python scripts/check_faults.py --tries 2 --kinds kill-worker terminate-local --json

Every try trains a small model with `python -m hetjax.train`, on a Ray cluster of its own or in one
process, does something to it at a random moment, and looks at the exit code, at the message, and at
what runs 30 seconds later. Then it resumes, and compares losses, gradient norms and the last
checkpoint's arrays with the undisturbed run's, bit by bit.

A driver is killed or told to end at a moment from the run's first second on; a worker is killed or
stopped at one from the first worker's beginning on; a disk is full from a step of the training on.
That disk is a small file system in memory, which takes root to make.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetjax.processes import Process, descendants, is_running
from hetjax.report import read_metrics

ROOT = Path(__file__).parents[1]
GONE_SECONDS = 30.0
"""How long after a fault a process of the run may be there."""

RUN_SECONDS = 180.0
"""How long a run may take in all."""

FIRST_SECONDS = 1.0
"""How long a driver is left alone."""

STEPS = 100
SAVE_EVERY = 10

DISK_BYTES = 24 << 20
LOOK_SECONDS = 0.02

CLUSTER = """
name: faults
kinds:
  quick: {peak_flops: {float32: 1.0e+9}, memory: 1 GB, memory_bandwidth: 10 GB/s, source: a test,
          platform: cpu}
  slow: {peak_flops: {float32: 5.0e+8}, memory: 1 GB, memory_bandwidth: 5 GB/s, source: a test,
         platform: cpu}
subclusters:
  - {name: quick, kind: quick, nodes: 1, devices_per_node: 1,
     intra_node: {bandwidth: 5 GB/s, latency: 20 us}}
  - {name: slow, kind: slow, nodes: 1, devices_per_node: 1,
     intra_node: {bandwidth: 5 GB/s, latency: 20 us}}
links:
  - {between: [quick, slow], bandwidth: 1 Gbit/s, latency: 0.1 ms}
"""
CONFIGURATION = f"""
cluster.file = "cluster.yaml"
model.recipe = "gpt-quickstart"
model.blocks = 2
model.width = 32
model.heads = 2
model.sequence = 32
data.kind = "synthetic"
data.size = 40000
train.steps = {STEPS}
train.batch_size = 8
train.microbatches = 4
train.checkpoint_every = {SAVE_EVERY}
planner.min_stages = 2
planner.max_pipelines = 1
"""


@dataclass(frozen=True)
class Kind:
    """A kind of fault.

    Args:
        runtime: where the run is.
        codes: the exit codes that it may have.
        says: a pattern of what it says on its last line; None for nothing.
        since: what its moment is counted from: seconds after the run's ``"start"``, seconds after
            the first ``"worker"`` is there, or a ``"step"``'s number.
        or_complete: whether the run may also end as if nothing were, with all its results there: a
            worker that has done its last is no loss.
    """

    runtime: str
    codes: tuple[int, ...]
    says: str | None
    since: str = "start"
    or_complete: bool = False


_LOST = r"error: (stage \d, host 0|.* worker.*) is lost: "
_STOPPED = r"SIGTERM: (ended while |stopping after this step)"
_UNWRITTEN = r"checkpoint \d+ was not (saved|written): .*No space left"
KINDS = {
    "kill-worker": Kind("ray", (3,), _LOST, "worker", or_complete=True),
    "stop-worker": Kind("ray", (3,), _LOST, "worker", or_complete=True),
    "kill-driver": Kind("ray", (-signal.SIGKILL,), None),
    "terminate-ray": Kind("ray", (128 + signal.SIGTERM,), _STOPPED),
    "terminate-local": Kind("local", (128 + signal.SIGTERM,), _STOPPED),
    "full-disk": Kind(
        "ray", (5,), r"checkpoint \d+ was not (saved|written): .*No space left", "step"
    ),
}


class Run:
    """A run of the train command.

    Args:
        folder: with its configuration.
        workdir: its work folder.
        runtime: ``"local"`` or ``"ray"``.
        options: what else to tell it.
    """

    def __init__(self, folder: Path, workdir: Path, runtime: str, options: Sequence[str] = ()):
        command = [sys.executable, "-m", "hetjax.train", "--config", str(folder / "run.gin")]
        command += ["--workdir", str(workdir), "--runtime", runtime, *options]
        if runtime == "ray":
            command += ["--ray-address", "local"]
        self._workdir = workdir
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 (it is closed with the run)
        self.began = time.monotonic()
        environment = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "RAY_ADDRESS")}
        self.process = subprocess.Popen(
            command, stdout=self._output, stderr=subprocess.STDOUT, cwd=ROOT, env=environment
        )

    def workers(self) -> list[Process]:
        """The workers' processes that are there."""
        return [each for each in descendants(self.process.pid) if _is_worker(each)]

    def steps_done(self) -> int:
        """How many steps are in its metrics."""
        return max((record["step"] for record in read_metrics(self._workdir)), default=0)

    def reaches(self, since: str, moment: float) -> bool:
        """Wait until a moment.

        Args:
            since: what it is counted from; see `Kind`.
            moment: when.

        Returns:
            Whether the run is still there.
        """
        seconds = 0.0 if since == "step" else moment
        while (since == "worker" and not self.workers()) or (
            since == "step" and self.steps_done() < moment
        ):
            if self.process.poll() is not None:
                return False
            time.sleep(LOOK_SECONDS)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
            return False
        return True

    def fill(self, path: Path) -> None:
        """Write to a file until the run ends: what a failed save gives back is taken too."""
        with path.open("wb", buffering=0) as file:
            while self.process.poll() is None and time.monotonic() < self.began + RUN_SECONDS:
                with contextlib.suppress(OSError):
                    file.write(bytes(1 << 12))
                    continue
                time.sleep(LOOK_SECONDS)

    def end(self) -> tuple[int | None, str]:
        """Wait for its end.

        Returns:
            Its exit code, None if it does not end; and what it has printed.
        """
        try:
            code = self.process.wait(max(0.0, self.began + RUN_SECONDS - time.monotonic()))
        except subprocess.TimeoutExpired:
            code = None
        with self._output as output:
            output.seek(0)
            return code, output.read().decode()


def _is_worker(process: Process) -> bool:
    try:
        return Path(f"/proc/{process.number}/cmdline").read_bytes().startswith(b"ray::HostWorker")
    except OSError:
        return False


def try_fault(
    name: str,
    folder: Path,
    workdir: Path,
    moment: float,
    chooser: random.Random,
    whole: tuple[Any, ...],
) -> dict[str, Any]:
    """Do something to a run at a moment, and look at what comes of it.

    Args:
        name: the kind of fault.
        folder: with the configuration.
        workdir: the run's work folder, which is not there yet.
        moment: when, as the kind counts it.
        chooser: chooses the worker.
        whole: what an undisturbed run computes; see `result_of`.

    Returns:
        What came of it.
    """
    kind, run = KINDS[name], Run(folder, workdir, KINDS[name].runtime)
    if not run.reaches(kind.since, moment):
        # The machine has become faster since the undisturbed run.
        run.end()
        workdir = workdir.with_name(f"{workdir.name}-")
        return try_fault(name, folder, workdir, moment / 2, chooser, whole)
    started, workers, step = descendants(run.process.pid), run.workers(), run.steps_done()
    began = time.monotonic()
    if name == "kill-driver":
        run.process.kill()
    elif name.startswith("terminate"):
        run.process.terminate()
    elif name == "full-disk":
        run.fill(workdir.parent / "filler")
    elif workers:
        how = signal.SIGKILL if name == "kill-worker" else signal.SIGSTOP
        os.kill(chooser.choice(workers).number, how)
    code, text = run.end()
    ended = time.monotonic() - began
    while (left := [each for each in started if is_running(each)]) and (
        time.monotonic() < began + ended + GONE_SECONDS
    ):
        time.sleep(0.2)
    gone = time.monotonic() - began
    for process in left:
        os.kill(process.number, signal.SIGKILL)
    last = [line for line in text.splitlines() if kind.says and re.match(kind.says, line)]
    in_vain = kind.or_complete and code == 0 and result_of(workdir) == whole
    native = "Check failure stack trace" in text or "*** SIG" in text or "Traceback" in text
    return {
        "kind": name,
        "workdir": str(workdir),
        "moment": round(began - run.began, 2),
        "step": step,
        "code": code,
        "message": last[-1] if last else text.strip().splitlines()[-1] if text.strip() else "",
        "in_vain": in_vain,
        "as_expected": not native
        and (in_vain or (code in kind.codes and (kind.says is None or bool(last)))),
        "seconds": round(ended, 2),
        "gone_seconds": round(gone, 2),
        "left": len(left),
    }


@contextlib.contextmanager
def _small_disk(folder: Path) -> Iterator[Path]:
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)]
    subprocess.run(mount, check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def result_of(workdir: Path) -> tuple[Any, ...]:
    """What a run has computed: losses and gradient norms of all steps, the last arrays."""
    records = [(each["step"], each["loss"], each["grad_norm"]) for each in read_metrics(workdir)]
    steps = [each for each in (workdir / "checkpoints").iterdir() if each.name.isdigit()]
    newest = max(steps, key=lambda each: int(each.name))
    return records, newest.name, arrays_of(newest)


def arrays_of(checkpoint: Path) -> str:
    """A hash of a checkpoint's arrays, read by Orbax."""
    import jax
    import numpy as np
    import orbax.checkpoint as ocp

    found = hashlib.sha256()
    stages = sorted(path.parent for path in checkpoint.rglob("_METADATA"))
    assert stages, f"{checkpoint} has no arrays"
    for stage in stages:
        with ocp.PyTreeCheckpointer() as reader:
            held = reader.metadata(stage).item_metadata.tree
            kept = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), held)
            tree = reader.restore(stage, restore_args=kept)
        for path, leaf in jax.tree.leaves_with_path(tree):
            found.update(f"{path} {np.asarray(leaf).dtype}".encode())
            found.update(np.asarray(leaf).tobytes())
    return found.hexdigest()


@dataclass(frozen=True)
class Undisturbed:
    """A run to which nothing was done.

    Args:
        seconds: how long it took.
        first_worker: seconds until there was a worker, or the run's end.
        result: what it computed; see `result_of`.
    """

    seconds: float
    first_worker: float
    result: tuple[Any, ...]

    def draw(self, since: str, chooser: random.Random) -> float:
        """Draw a moment of such a run: not of its last tenth, when it may be over before."""
        end = 0.9 * self.seconds
        if since == "step":
            # The last checkpoint is yet to be written then.
            return chooser.randint(1, STEPS - SAVE_EVERY)
        if since == "worker":
            return chooser.uniform(0.0, max(0.0, end - self.first_worker))
        return chooser.uniform(FIRST_SECONDS, max(FIRST_SECONDS, end))


def undisturbed(folder: Path, runtime: str) -> Undisturbed:
    """Do a run, and do nothing to it."""
    workdir = folder / f"whole-{runtime}"
    run = Run(folder, workdir, runtime)
    run.reaches("worker", 0.0)
    first_worker = time.monotonic() - run.began
    code, text = run.end()
    assert code == 0, text
    return Undisturbed(time.monotonic() - run.began, first_worker, result_of(workdir))


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All tries of all kinds."""
    (folder / "cluster.yaml").write_text(CLUSTER)
    (folder / "run.gin").write_text(CONFIGURATION)
    chooser = random.Random(options.seed)
    whole = {
        runtime: undisturbed(folder, runtime)
        for runtime in sorted({KINDS[name].runtime for name in options.kinds})
    }
    rows = []
    for number in range(options.tries):
        for name in options.kinds:
            runtime = KINDS[name].runtime
            moment = whole[runtime].draw(KINDS[name].since, chooser)
            at = folder / f"{name}-{number}"
            is_disk = name == "full-disk"
            with _small_disk(at) if is_disk else contextlib.nullcontext(at) as place:
                workdir = place / "run"
                row = try_fault(name, folder, workdir, moment, chooser, whole[runtime].result)
                workdir = Path(row.pop("workdir"))
                (place / "filler").unlink(missing_ok=True)
                again = Run(folder, workdir, runtime, ["--resume-or-start"])
                code, text = again.end()
                row["resumed"] = code == 0
                row["bitwise"] = code == 0 and result_of(workdir) == whole[runtime].result
                row["resumed_says"] = "" if code == 0 else text.strip().splitlines()[-1]
            rows.append(row)
            print(json.dumps(row), file=sys.stderr)
    return {
        "undisturbed_seconds": {runtime: run.seconds for runtime, run in whole.items()},
        "kinds": {
            name: {
                "tries": len(of),
                "in_vain": sum(row["in_vain"] for row in of),
                "as_expected": sum(row["as_expected"] for row in of),
                "nothing_left": sum(row["left"] == 0 for row in of),
                "bitwise": sum(row["bitwise"] for row in of),
                "longest_seconds": max(row["seconds"] for row in of),
            }
            for name in options.kinds
            if (of := [row for row in rows if row["kind"] == name])
        },
        "rows": rows,
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Faults at random moments of real runs.")
    parser.add_argument("--tries", type=int, default=10, help="of each kind")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--json", action="store_true", help="print the figures as one JSON object")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="faults") as folder:
        result = measure(options, Path(folder))
    if options.json:
        print(json.dumps(result, indent=1))
    else:
        print(f"{'':16} tries  in vain  as expected  nothing left  bitwise  longest")
        for name, row in result["kinds"].items():
            print(
                f"{name:16} {row['tries']:5}  {row['in_vain']:7}  {row['as_expected']:11}  "
                f"{row['nothing_left']:12}  {row['bitwise']:7}  {row['longest_seconds']:5.1f} s"
            )
    kinds = result["kinds"].values()
    wanted = ("as_expected", "nothing_left", "bitwise")
    return 0 if all(row[each] == row["tries"] for row in kinds for each in wanted) else 1


if __name__ == "__main__":
    sys.exit(main())
