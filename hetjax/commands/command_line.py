"""Options, errors and exit codes, the same for every command.

A command ends with 0 when it has done what was asked, 2 when something that a person gave is wrong,
3 when a worker was lost, 4 when losses or gradients stayed not finite, 5 when the last checkpoint,
another file of the run or the standard output could not be written, 130 when Ctrl-C stopped it, 143
when SIGTERM did and 129 when SIGHUP did (its terminal is gone), at any moment.
"""

from __future__ import annotations

import argparse
import errno
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TextIO, cast

from hetjax.commands.output import Output
from hetjax.errors import InputError, NonfiniteError, WorkerLostError, reason_of

if TYPE_CHECKING:
    from hetjax.configuration import Configuration

WRONG_INPUT = 2
LOST_WORKER = 3
NOT_FINITE = 4
NOT_WRITTEN = 5
INTERRUPTED = 130

_OF_FILES = {
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS, errno.EINVAL), WRONG_INPUT),
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EIO), NOT_WRITTEN),
}
"""What ends a command with one line where a file or a folder of a person's may not be used."""


class Parser(argparse.ArgumentParser):
    """A parser whose errors are `InputError`, and whose help lists all settings.

    Args:
        command: the module that is run, e.g. ``"hetjax.train"``.
        description: what it does, in a sentence.
        configured: whether a person names the settings; else they are those of a work folder.
    """

    def __init__(self, command: str, description: str, *, configured: bool = True):
        super().__init__(
            prog=_program(command),
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        if configured:
            self._add_settings()

    def _add_settings(self) -> None:
        # Not at the top: a command hears signals before it imports what takes a moment.
        from hetjax.configuration import settings_help

        self.epilog = f"Settings, for gin files and --gin:\n\n{settings_help()}"
        self.add_argument(
            "--config",
            type=named,
            metavar="FILE",
            help="gin file with the settings, or the name of one that comes with hetjax, such as "
            "quickstart",
        )
        self.add_argument(
            "--gin",
            metavar="'NAME = VALUE'",
            action="append",
            default=[],
            help="a setting that overrides the file's; may be given again",
        )

    def error(self, message: str) -> NoReturn:
        """Raise an `InputError` instead of printing the usage.

        Raises:
            InputError: always.
        """
        raise InputError(f"{message}; --help lists what is allowed")


def named(text: str) -> str:
    """What an option names: a file, a folder, an address; as argparse's ``type``.

    An empty text comes of a variable of a shell that is not set, and would be taken for no option.

    Args:
        text: what was given.

    Returns:
        The same.

    Raises:
        ArgumentTypeError: it is empty.
    """
    if not text:
        raise argparse.ArgumentTypeError("'' names nothing; give a name, or leave the option out")
    return text


def device_number(text: str) -> int:
    """The number of a device, as argparse's ``type``.

    Args:
        text: what was given.

    Returns:
        The number, which is 0 or more.

    Raises:
        ArgumentTypeError: it is none.
    """
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no device's number, 0 or more")
    return int(text)


@contextmanager
def as_option() -> Iterator[None]:
    """Errors in this block begin with a field's name, which is that of the option that gives it.

    Raises:
        InputError: as it was raised, with ``--lost`` for ``lost``.
    """
    try:
        yield
    except InputError as error:
        raise InputError(f"--{error}") from None


def _program(command: str) -> str:
    """What a person typed to run a command: ``hetjax train`` or ``python -m hetjax.train``."""
    typed = Path(sys.argv[0])
    if typed.name == "__main__.py" and typed.parent.name == "hetjax":
        return f"python -m {command.replace('.', ' ')}"
    return command.replace(".", " ") if typed.stem == "hetjax" else f"python -m {command}"


def configuration_of(arguments: argparse.Namespace) -> Configuration:
    """The configuration that the options name.

    Args:
        arguments: what the parser made of the command line.

    Returns:
        The configuration.

    Raises:
        InputError: there is no ``--config``, it is wrong, or text that it names is not UTF-8.
    """
    from hetjax.configuration import configuration_file, read_configuration

    if arguments.config is None:
        raise InputError(
            "--config is missing; name a gin file, or quickstart, which comes with hetjax"
        )
    configuration = read_configuration(configuration_file(arguments.config), arguments.gin)
    if configuration.data.kind == "text":
        _check_text(configuration.data.paths)
    return configuration


def _check_text(paths: Sequence[str]) -> None:
    """Checks text before anything heavier is imported; it is read again when it is used."""
    from hetjax.data import text

    # Whether it is enough is said by those who know the model's sequence.
    (part,) = text(paths, sequence=1).parts
    _ = part.corpus.tokens()


def run_command(
    command: Callable[[argparse.Namespace], int],
    make_parser: Callable[[], Parser],
    argv: Sequence[str] | None,
    *,
    outlives_output: bool = False,
) -> int:
    """Run a command; what a person got wrong becomes one line and an exit code.

    Args:
        command: from the options to the exit code.
        make_parser: makes what reads them.
        argv: the command line; None for this process's.
        outlives_output: as `with_output` has it.

    Returns:
        The exit code.
    """
    return with_output(
        lambda output: _exit_code(command, make_parser, argv, output),
        outlives_output=outlives_output,
    )


def with_output(command: Callable[[Output], int], *, outlives_output: bool = False) -> int:
    """Run what prints; a standard output that fails does not end it, and becomes an exit code.

    It is told in a line, but for a reader that went away: what only prints ends quietly then.

    Args:
        command: from the standard output, which takes all, to the exit code.
        outlives_output: whether the command does more than to print, so that it goes on where
            nobody reads it, and says so.

    Returns:
        The exit code.
    """
    errors = cast("TextIO", Output(sys.stderr))

    def tell(error: OSError) -> None:
        if outlives_output or not isinstance(error, BrokenPipeError):
            end = "; the command goes on without it" if outlives_output else ""
            line = f"error: the standard output cannot be written to: {reason_of(error)}{end}"
            print(line, file=errors)

    output = Output(sys.stdout, tell)
    with redirect_stdout(cast("TextIO", output)), redirect_stderr(errors):
        code = command(output)
        output.flush()
    return code if output.failure is None else code or NOT_WRITTEN


def _exit_code(
    command: Callable[[argparse.Namespace], int],
    make_parser: Callable[[], Parser],
    argv: Sequence[str] | None,
    output: Output,
) -> int:
    try:
        arguments = make_parser().parse_args(argv)
        with _only_results(output) if getattr(arguments, "json", False) else nullcontext():
            return command(arguments)
    except SystemExit as end:  # argparse's, when it has printed the help.
        return int(end.code or 0)
    except InputError as error:
        return _fail(error, WRONG_INPUT)
    except WorkerLostError as error:
        return _fail(error, LOST_WORKER)
    except NonfiniteError as error:
        return _fail(error, NOT_FINITE)
    except OSError as error:
        code = _OF_FILES.get(error.errno or 0)
        if code is None or error.filename is None:
            raise
        return _fail(error, code)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED


@contextmanager
def _only_results(output: Output) -> Iterator[None]:
    """Keeps standard output for results: what libraries print there goes to standard error.

    HiGHS does, by C: so the process's own descriptor has to be another one meanwhile.
    """
    try:
        own, other = output.fileno(), sys.stderr.fileno()
    except (OSError, ValueError):
        yield  # These are no files, such as in a notebook.
        return
    output.flush()
    kept, printed = os.dup(own), output.file
    results = os.fdopen(os.dup(own), "w", encoding=output.encoding)
    os.dup2(other, own)
    output.file = results
    try:
        yield
    finally:
        output.flush()
        output.file = printed
        os.dup2(kept, own)
        os.close(kept)
        with suppress(OSError):  # That of the flush, once more.
            results.close()


def _fail(error: Exception, code: int) -> int:
    is_of_file = isinstance(error, OSError)
    said = f"{error.filename}: {error.strerror}" if is_of_file else str(error)
    line = " ".join("; ".join([said, *getattr(error, "__notes__", ())]).split())
    # A file's name or content must not tell the terminal what to do.
    shown = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)
    print(f"error: {shown}", file=sys.stderr)
    return code
