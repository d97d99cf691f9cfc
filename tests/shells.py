"""Shells that run what a page says, block after block, as a person would type it."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

_POLL_SECONDS = 0.1


class Shell:
    """A bash that ends at the first command that fails.

    What a block exports holds in the next ones. Commands read nothing from the terminal.

    Args:
        folder: where what the blocks print is kept.
        command: what starts the bash; blocks come to its standard input.
        environment: its whole environment.
        place: its working directory.
    """

    def __init__(
        self,
        folder: Path,
        environment: Mapping[str, str],
        place: Path,
        command: Sequence[str] = ("bash", "-e"),
    ):
        folder.mkdir(parents=True)
        self._folder, self._count, self._text = folder, 0, ""
        self._bash = subprocess.Popen(
            command, stdin=subprocess.PIPE, env=environment, cwd=place, text=True
        )

    def begin(self, text: str) -> None:
        """Start running a block."""
        assert self._bash.stdin is not None
        self._count, self._text = self._count + 1, text
        block = f"{{ {text}\n}} < /dev/null > '{self._said}' 2>&1\ntouch '{self._done}'\n"
        self._bash.stdin.write(block)
        self._bash.stdin.flush()

    def end(self, seconds: float = 120.0) -> str:
        """Wait for the block that was begun last.

        Args:
            seconds: how long it may take.

        Returns:
            What it printed.
        """
        end = time.monotonic() + seconds
        while not self._done.exists():
            assert self._bash.poll() is None, f"it failed: {self._story()}"
            assert time.monotonic() < end, f"it takes more than {seconds:g} s: {self._story()}"
            time.sleep(_POLL_SECONDS)
        return self.said()

    def run(self, text: str, seconds: float = 120.0) -> str:
        """Run a block to its end.

        Returns:
            What it printed.
        """
        self.begin(text)
        return self.end(seconds)

    def said(self) -> str:
        """What the block has printed so far."""
        return self._said.read_text(errors="replace") if self._said.exists() else ""

    def interrupt(self) -> None:
        """Press Ctrl-C: what the shell runs gets the signal, and the shell goes on."""
        number = self._bash.pid
        children = Path(f"/proc/{number}/task/{number}/children").read_text().split()
        assert children, f"it runs no more: {self._story()}"
        for child in children:
            os.kill(int(child), signal.SIGINT)

    def close(self) -> None:
        """End the shell."""
        self._bash.kill()
        self._bash.wait()
        assert self._bash.stdin is not None
        self._bash.stdin.close()

    def _story(self) -> str:
        return f"{self._text.strip()}\n{self.said()}"

    @property
    def _said(self) -> Path:
        return self._folder / f"{self._count}.txt"

    @property
    def _done(self) -> Path:
        return self._folder / f"{self._count}.done"
