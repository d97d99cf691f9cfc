"""How far the training is: a bar on a terminal, a plain line every few steps elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Self

from hetjax.mesh.quantities import format_seconds

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress


class TrainingProgress:
    """Shows step, loss, rate and the time left while a training loop runs.

    Where the output is no terminal (a log file, CI, a notebook) it prints one plain line every
    `every` steps and one for the last step, so that logs stay readable.

    Args:
        num_steps: the number of the last step, counted from 1.
        steps_done: steps that an earlier run did, when this one resumes it.
        unit: what the rate counts.
        every: steps from one plain line to the next; no effect on a terminal.
        console: where to print; the standard output by default.
        clock: gives the time in seconds, from any zero.

    Example:
        >>> with TrainingProgress(num_steps=2, every=1) as progress:
        ...     progress.update(1, loss=5.5451, rate=12345.0)
        ...     progress.print("checkpoint saved")
        step 1/2  loss 5.5451  12,345 tokens/s
        checkpoint saved
    """

    def __init__(
        self,
        num_steps: int,
        *,
        steps_done: int = 0,
        unit: str = "tokens",
        every: int = 10,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        from rich.console import Console

        self._num_steps = num_steps
        self._steps_done = steps_done
        self._unit = unit
        self._every = every
        self._console = console or Console()
        self._clock = clock
        self._began: tuple[int, float] | None = None
        self._bar: Progress | None = None

    def __enter__(self) -> Self:
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._bar = _bar(self._console)
            self._bar.add_task("", total=self._num_steps, completed=self._steps_done)
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def update(self, step: int, loss: float, rate: float) -> None:
        """Shows that a step is done.

        Args:
            step: the number of the step, from 1.
            loss: its loss.
            rate: tokens, or what else is counted, in a second.
        """
        text = f"step {step}/{self._num_steps}  loss {loss:.4f}  {rate:,.0f} {self._unit}/s"
        left = self._time_left(step)
        if left is not None:
            text += f"  {format_seconds(left)} left"
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=step, description=text)
        elif step % self._every == 0 or step == self._num_steps:
            self.print(text)

    def print(self, text: str) -> None:
        """Prints a line of its own, above the bar if there is one.

        Args:
            text: plain text.
        """
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _time_left(self, step: int) -> float | None:
        """Seconds to the last step at the mean pace since the first; None where not known yet.

        The first step's own time does not count: it holds the compilation.
        """
        now = self._clock()
        if self._began is None:
            self._began = (step, now)
        first, began = self._began
        if step == first or step >= self._num_steps:
            return None
        # Whole seconds: the digits after them are noise that would flicker.
        return float(round((now - began) / (step - first) * (self._num_steps - step)))


class MeasuringProgress:
    """Shows which measurement, or other piece of work, is done, on the standard error.

    The standard output stays free for results. Where it is no terminal it prints a plain line for
    each tenth of the pieces.

    Args:
        word: what is done to a piece.

    Example:
        >>> with MeasuringProgress() as progress:
        ...     progress.update(1, 12, "layers 3 to 4 on a")
    """

    def __init__(self, word: str = "measured") -> None:
        from rich.console import Console

        self._word = word
        self._console = Console(stderr=True)
        self._bar: Progress | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, count: int, total: int, what: str) -> None:
        """Show that a piece is done.

        Args:
            count: how many are done.
            total: how many there are.
            what: the one that was done.
        """
        text = f"{self._word} {count} of {total}: {what}"
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            if self._bar is None:
                self._bar = _bar(self._console)
                self._bar.add_task("")
                self._bar.start()
            # What follows may have another number of pieces.
            self._bar.update(self._bar.task_ids[0], completed=count, total=total, description=text)
        elif count == total or 10 * count // total > 10 * (count - 1) // total:
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def _bar(console: Console) -> Progress:
    from rich.progress import BarColumn, Progress, TextColumn

    # On a narrow terminal the bar gives way, not the figures.
    return Progress(
        BarColumn(bar_width=None),
        TextColumn("{task.description}", markup=False),
        console=console,
        expand=True,
    )
