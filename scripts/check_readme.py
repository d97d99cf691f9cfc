"""Run the README as a newcomer would: an empty home, a fresh clone, a fresh environment.

    python scripts/check_readme.py
    python scripts/check_readme.py --venv /tmp/kept --leave-out pytest --json

Every command of every ``bash`` block of README.md is run in its order, in one terminal's
environment, in a clone of what is committed. A ``yaml`` block is written to the file that the text
before it names last. What a ``text`` block shows right after a ``bash`` block must be printed by
that block's last command, but for how long something took; ``...`` stands for any lines. Figures in
sentences that a command prints are compared, too (`CLAIMS`). A command under a comment with the
words ``needs ...`` is not run. Then the notebooks of ``examples/`` are run
with the same home, and the tutorial of two PCs in the lab, where this machine can make one.

It takes most of an hour, nearly all of it the tests; it starts Ray on its usual ports, where none
may be running, and ends what it has started.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from pages import Block, code_blocks

from hetjax.processes import end_descendants

ROOT = Path(__file__).parents[1]
SHELL, FILE, SHOWN = "bash", "yaml", "text"

COLUMNS = 95
"""The width of the terminal that the README's tables were printed in."""

COMMAND_SECONDS = 5400.0
"""How long a command may take: the tests take longest."""

_NEEDS = re.compile(r"\bneeds\b.*")
_FILE_NAME = re.compile(r"`([\w./-]+\.ya?ml)`")
_DURATION = re.compile(r"(\bprofile|\bsearch|\bDynamicProgram) \(?[\d.]+ (?:s|ms|us)\b")
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of Linux's prctl.

_KEPT = re.compile(r"PIP_\w+|\w+_proxy|\w+_PROXY|SSL_CERT_\w+|REQUESTS_CA_BUNDLE|CURL_CA_BUNDLE")
"""What of the environment says how packages are reached; nothing else is kept."""

_NOTEBOOK = """
import sys, nbformat, nbclient
notebook = nbformat.read(sys.argv[1], as_version=4)
nbclient.NotebookClient(notebook, timeout=600).execute()
"""
_TUTORIAL = "tests/lab/test_home_laboratory.py"


@dataclass(frozen=True)
class Claim:
    """A figure in the page's sentences that a command prints.

    Args:
        command: what the command has in it.
        said: a pattern of the sentence, whose group is the figure.
        printed: a pattern of the line that is printed, whose group is the figure.
    """

    command: str
    said: str
    printed: str


CLAIMS = (
    Claim(
        "hetjax.train --config configs/quickstart.gin",
        r"\(([\d.]+) times the\s+speed of the fast devices alone\)",
        r"^fast \(2\) .* ([\d.]+) times *$",
    ),
)


@dataclass(frozen=True)
class Command:
    """A command of a page.

    Args:
        text: the command, without the comments before it.
        line: the page's line that it begins at.
        needs: what it needs that is not everywhere, as the page says; None for nothing.
        shown: what the page shows of its output; None for nothing.
        figures: what the page's sentences say of its output: patterns, and what their groups are.
    """

    text: str
    line: int
    needs: str | None = None
    shown: str | None = None
    figures: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Outcome:
    """What came of something that was run, or not.

    Args:
        what: the command, the notebook or the test.
        line: where it is in the README; None for what is not there.
        state: ``"ok"``, ``"failed"`` or ``"not run"``.
        why: of a failure, or of not running it.
        shown: whether the README shows or says something of its output, which was compared.
        seconds: how long it took.
    """

    what: str
    line: int | None
    state: str
    why: str = ""
    shown: bool = False
    seconds: float = 0.0


def commands(block: Block) -> list[Command]:
    r"""The commands of a block for a shell.

    Args:
        block: the block. A line that ends in a backslash goes on in the next.

    Returns:
        The commands; a comment before or behind one may say what it needs.

    Example:
        >>> block = Block("bash", "", "cd a  # go\n# It needs a GPU:\ntrain \\\n  --long\n", 7)
        >>> [(each.text, each.line, each.needs) for each in commands(block)]
        [('cd a  # go', 7, None), ('train \\\n  --long', 9, 'needs a GPU')]
    """
    found: list[Command] = []
    comment, lines = "", list[str]()
    for number, line in enumerate(block.text.splitlines(), start=block.line):
        if not lines and (not line.strip() or line.lstrip().startswith("#")):
            comment += line.lstrip("# ")
            continue
        lines.append(line)
        if not line.endswith("\\"):
            text = "\n".join(lines)
            needs = _NEEDS.search(comment) or _NEEDS.search(_comment_behind(text))
            said = needs[0].rstrip(":. ") if needs else None
            found.append(Command(text, number - len(lines) + 1, said))
            comment, lines = "", []
    if lines:
        raise ValueError(f"line {block.line}: the block ends inside a command")
    return found


def _comment_behind(text: str) -> str:
    """The comment behind a command; none where the mark is inside quotes."""
    reader = shlex.shlex(text, posix=True, punctuation_chars=True)
    reader.whitespace_split = True
    reader.commenters = ""
    words = list(reader)
    return " ".join(words[words.index("#") :]) if "#" in words else ""


def readme(page: str) -> Iterator[Command | tuple[str, str]]:
    """What a newcomer does, from a page's top to its bottom.

    Args:
        page: its Markdown.

    Yields:
        Commands, and files to write: their names and what is in them.

    Raises:
        ValueError: a block says nothing of what it is, or names no file.
    """
    blocks = code_blocks(page)
    fences = [number for number, line in enumerate(page.splitlines()) if line.startswith("```")]
    if len(fences) != 2 * len(blocks):
        raise ValueError("a fence has no end, or says more than a language")
    for block, after in zip(blocks, [*blocks[1:], None], strict=True):
        if not block.language:
            raise ValueError(f"line {block.line}: the block does not say what it is")
        if block.language == FILE:
            before = "\n".join(page.splitlines()[: block.line - 1])
            names = _FILE_NAME.findall(before)
            if not names:
                raise ValueError(f"line {block.line}: nothing says what the file is called")
            yield names[-1], block.text
        elif block.language == SHELL:
            *first, last = (replace(each, figures=_figures(page, each)) for each in commands(block))
            yield from first
            shown = after.text if after is not None and after.language == SHOWN else None
            yield replace(last, shown=shown)


def _figures(page: str, command: Command) -> tuple[tuple[str, str], ...]:
    """What a page's sentences say of a command's output."""
    return tuple(
        (claim.printed, figure)
        for claim in CLAIMS
        if claim.command in command.text
        for figure in re.findall(claim.said, page)
    )


def untrue(command: Command, printed: str) -> str | None:
    r"""What a page says of a command's output that is not so.

    Args:
        command: the command.
        printed: what it printed.

    Returns:
        A sentence; None where all is true.

    Example:
        >>> command = Command("plan", 1, shown="a\n", figures=((r"(\d) times", "2"),))
        >>> untrue(command, "a\n2 times\n"), untrue(command, "a\n3 times\n")
        (None, 'it prints 3 where the page says 2')
    """
    if command.shown is not None and (line := missing(command.shown, printed)):
        return f"it does not print what is shown, from here on: {line.strip()}"
    for pattern, figure in command.figures:
        found = re.findall(pattern, printed, re.M)
        if found != [figure]:
            return f"it prints {', '.join(found) or 'nothing'} where the page says {figure}"
    return None


def missing(shown: str, printed: str) -> str | None:
    r"""What a page shows, and a command did not print there.

    Args:
        shown: what is shown; ``...`` stands for any lines, none included.
        printed: what was printed.

    Returns:
        The first line of a passage that was not printed in its place; None where all were.

    Example:
        >>> missing("b\n...\nd\n", "a\nb  \nc\nd\n"), missing("a\nc\n", "a\nb\nc\n")
        (None, 'a')
    """
    lines = _comparable(printed)
    passages = [_comparable(each) for each in re.split(r"^\.\.\.\n", shown, flags=re.M)]
    for passage in filter(None, passages):
        size = len(passage)
        places = [i for i in range(len(lines) - size + 1) if lines[i : i + size] == passage]
        if not places:
            return passage[0]
        lines = lines[places[0] + size :]
    return None


def _comparable(text: str) -> list[str]:
    """Lines without what differs from run to run: durations, and spaces at their ends."""
    return [_DURATION.sub(r"\1", line).rstrip() for line in text.splitlines()]


class Newcomer:
    """Somebody with an empty home, a clone and a terminal.

    Args:
        folder: an empty folder for all of it; its path is short, since Ray's sockets are in it.
        environment: a virtual environment, which is made where it is not there.
    """

    def __init__(self, folder: Path, environment: Path):
        self.clone, self._exported = folder / "hetjax", folder / "exported"
        for made in ("home", "tmp"):
            (folder / made).mkdir()
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(self.clone)], check=True)
        if not (environment / "bin" / "python").exists():
            venv.create(environment, with_pip=True)
        self._environment = {
            **{name: value for name, value in os.environ.items() if _KEPT.fullmatch(name)},
            "COLUMNS": str(COLUMNS),
            "HOME": str(folder / "home"),
            "LANG": "C.UTF-8",
            "PATH": f"{environment}/bin:{os.defpath}:/usr/sbin:/sbin",
            # Other users of this machine have Ray's usual folder.
            "RAY_TMPDIR": str(folder / "tmp"),
            "VIRTUAL_ENV": str(environment),
        }

    def run(self, text: str, folder: Path | None = None) -> tuple[int | None, str, str]:
        """Type a command; what it exports is there for the next ones.

        Returns:
            The exit code, None where it takes too long; what it printed, and its errors.
        """
        exported = shlex.quote(str(self._exported))
        script = f"[ ! -e {exported} ] || . {exported}\n{text}\nexport -p > {exported}\n"
        with tempfile.TemporaryFile() as printed, tempfile.TemporaryFile() as errors:
            code = None
            with subprocess.Popen(
                ["bash", "-e", "-c", script],
                cwd=folder or self.clone,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=errors,
            ) as process:
                try:
                    code = process.wait(COMMAND_SECONDS)
                except subprocess.TimeoutExpired:
                    process.kill()
            found = []
            for file in (printed, errors):
                file.seek(0)
                found.append(file.read().decode(errors="replace"))
        return code, found[0], found[1]


def outcome(newcomer: Newcomer, command: Command, folder: Path | None = None) -> Outcome:
    """Run a command, and see whether it does what is said of it."""
    began, why = time.monotonic(), ""
    code, printed, errors = newcomer.run(command.text, folder)
    if code != 0:
        last = (errors.strip() or printed.strip()).splitlines()[-1:]
        how = f"takes more than {COMMAND_SECONDS:g} s" if code is None else f"exit code {code}"
        why = ": ".join([how, *last])
        print("\n".join([printed, errors])[-4000:], file=sys.stderr)
    else:
        why = untrue(command, printed) or ""
    return Outcome(
        command.text,
        command.line or None,
        "failed" if why else "ok",
        why,
        bool(command.shown or command.figures),
        round(time.monotonic() - began, 1),
    )


def check(newcomer: Newcomer, left_out: Sequence[str]) -> Iterator[Outcome]:
    """Do all that the README says, then the notebooks and the tutorial.

    Args:
        newcomer: who does it.
        left_out: what commands have in them that are not to be run.

    Yields:
        What came of each.
    """
    for step in readme((newcomer.clone / "README.md").read_text()):
        if isinstance(step, tuple):
            name, text = step
            (newcomer.clone / name).write_text(text)
        elif step.needs is not None:
            yield Outcome(step.text, step.line, "not run", step.needs)
        elif any(each in step.text for each in left_out):
            yield Outcome(step.text, step.line, "not run", "left out by --leave-out")
        else:
            yield outcome(newcomer, step)
    end_descendants()  # Ray, above all.
    examples = newcomer.clone / "examples"
    others = [
        (Command(f"python -c {shlex.quote(_NOTEBOOK)} {path.name}", 0), f"examples/{path.name}")
        for path in sorted(examples.glob("*.ipynb"))
    ]
    others += [(Command(f"cd .. && pytest -m lab -rs {_TUTORIAL}", 0), _TUTORIAL)]
    for command, name in others:
        if any(each in name for each in left_out):
            yield Outcome(name, None, "not run", "left out by --leave-out")
            continue
        found = asdict(outcome(newcomer, command, examples))
        yield Outcome(**{**found, "what": name})


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--venv",
        type=Path,
        metavar="PATH",
        help="an environment to use and keep, instead of a fresh one; packages are installed there",
    )
    parser.add_argument(
        "--leave-out",
        nargs="+",
        default=[],
        metavar="TEXT",
        help="do not run what has this in it, but list it",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(argv)
    # What a command leaves running, as `ray start` does, is this process's child then.
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="new", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        environment = (options.venv or folder / "venv").absolute()
        try:
            for found in check(Newcomer(folder, environment), options.leave_out):
                outcomes.append(found)
                if not options.json:
                    _tell(found)
        finally:
            end_descendants()
    states = [each.state for each in outcomes]
    if options.json:
        print(json.dumps({"rows": [asdict(each) for each in outcomes]}, indent=1))
    else:
        counts = ", ".join(f"{states.count(each)} {each}" for each in ("ok", "failed", "not run"))
        print(counts)
    return 1 if "failed" in states else 0


def _tell(found: Outcome) -> None:
    line = f"{found.line:4}" if found.line else "    "
    first = found.what.splitlines()[0]
    shown = ", prints what is said" if found.shown and found.state == "ok" else ""
    why = f"\n{'':24}{found.why}" if found.why else ""
    print(f"{line}  {found.state:7} {found.seconds:7.1f} s  {first}{shown}{why}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
