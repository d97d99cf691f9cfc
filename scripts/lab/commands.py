"""The commands of the lab: ``python scripts/lab COMMAND``.

A command ends with 0 when it has done what was asked, 1 when the system did not do it, 2 when
something that a person gave is wrong or this machine cannot hold a lab, 130 when Ctrl-C stopped it
and 143 when SIGTERM did. ``run`` and ``train`` end as what they run does.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from hetjax.errors import InputError, unknown_name
from lab.building import take_down
from lab.lab import LIFETIME_SECONDS, Lab
from lab.state import choose, present
from lab.system import LabError, check_machine

MAX_HOURS = 24.0
"""The longest that a lab may stay up by itself."""

_Command = Callable[[argparse.Namespace], None]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: its options; None for this process's.

    Returns:
        The exit code.
    """
    signal.signal(signal.SIGTERM, _terminated)
    try:
        options = _parse(arguments)
        options.command(options)
    except InputError as error:
        return _fail(error, 2)
    except LabError as error:
        return _fail(error, 1)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}; --help says what is allowed")


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = _parser()
    options, options.more = parser.parse_known_args(arguments)
    if options.more and not options.takes_more:
        parser.error(f"unrecognized arguments: {' '.join(options.more)}")
    return options


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="lab", description="A cluster of unlike hosts on this machine.")
    parser.set_defaults(takes_more=False)
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=_Parser)

    def add(
        name: str, command: _Command, purpose: str, *, of_a_lab: bool = True
    ) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=purpose, description=purpose, allow_abbrev=False)
        added.set_defaults(command=command)
        if of_a_lab:
            added.add_argument("--lab", metavar="NAME", help="which lab, where several are up")
        return added

    up = add("up", _up, "bring a lab up, or back to what its file says", of_a_lab=False)
    up.add_argument("spec", metavar="SPEC", help="a YAML file, or a name in configs/lab")
    hours = LIFETIME_SECONDS / 3600
    up.add_argument(
        "--hours", type=float, default=hours, help=f"when it goes down by itself ({hours:g})"
    )
    run = add("run", _run, "run a command on a host")
    run.add_argument("host", metavar="HOST")
    run.add_argument("words", metavar="-- CMD", nargs=argparse.REMAINDER)
    train = add("train", _train, "run hetjax.train on the first host, with its options, with Ray")
    train.set_defaults(takes_more=True)
    change = add("set", _set, "set the rate of a link (35mbit, unlimited) or a host's speed (0.5)")
    change.add_argument("what", metavar="LINK|HOST")
    change.add_argument("value", metavar="RATE|SPEED")
    for name, purpose in (
        ("kill", "kill all processes of a host"),
        ("stop", "stop all processes of a host where they are"),
        ("resume", "let a stopped host go on"),
    ):
        add(name, _on_host(name), purpose).add_argument("host", metavar="HOST")
    for name, purpose in (("cut", "cut a link"), ("mend", "connect a link that was cut")):
        add(name, _on_link(name), purpose).add_argument("link", metavar="LINK")
    add("status", _status, "say what the lab is and does")
    down = add("down", _down, "take a lab down; nothing of it remains", of_a_lab=False)
    down.add_argument("name", metavar="NAME", nargs="?", help="which; the only one unless given")
    down.add_argument("--all", action="store_true", help="all labs")
    return parser


def _up(options: argparse.Namespace) -> None:
    if not 0 < options.hours <= MAX_HOURS:
        raise InputError(
            f"--hours: {options.hours:g} is not allowed: more than 0, up to {MAX_HOURS:g}"
        )
    _show(Lab.up(options.spec, 3600 * options.hours))


def _run(options: argparse.Namespace) -> None:
    words = options.words[1:] if options.words[:1] == ["--"] else options.words
    if not words:
        raise InputError("the command is missing: lab run HOST -- CMD")
    _become(Lab.attach(options.lab), options.host, words)


def _train(options: argparse.Namespace) -> None:
    lab = Lab.attach(options.lab)
    words = [sys.executable, "-m", "hetjax.train", "--runtime", "ray", *options.more]
    _become(lab, lab.specification.head.name, words)


def _become(lab: Lab, host: str, words: Sequence[str]) -> NoReturn:
    """Go on as another command, so that signals and the exit code are its own."""
    command = lab.command(host, words)
    os.execvpe(command[0], command, lab.environment())


def _set(options: argparse.Namespace) -> None:
    lab = Lab.attach(options.lab)
    host_names = [host.name for host in lab.specification.hosts]
    if options.what in host_names:
        lab.set_speed(options.what, _number(options.value))
    elif "-" in options.what:
        lab.set_link(options.what, options.value)
    else:
        known = [*host_names, *(link.name for link in lab.specification.links)]
        raise InputError(unknown_name("host or link", options.what, known))


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InputError(f"{text!r} is not a number, such as 0.5") from None


def _on_host(name: str) -> _Command:
    return lambda options: getattr(Lab.attach(options.lab), name)(options.host)


def _on_link(name: str) -> _Command:
    return lambda options: getattr(Lab.attach(options.lab), name)(options.link)


def _status(options: argparse.Namespace) -> None:
    check_machine()
    if options.lab is None and not present():
        print("no lab is up")
        return
    _show(Lab.attach(options.lab))


def _down(options: argparse.Namespace) -> None:
    check_machine()
    if options.name is None and (options.all or not present()):
        chosen = present()
    else:
        chosen = [choose(options.name)]
    for name in chosen:
        take_down(name)
        print(f"{name} is down")
    if not chosen:
        print("no lab is up")


def _show(lab: Lab) -> None:
    print(f"lab {lab.specification.name}")
    print(f"{'host':12}{'address':14}{'cores':10}{'speed':>6}{'processes':>11}  Ray")
    for host in lab.host_status():
        cores = ",".join(str(core) for core in host.cores)
        place = f"{host.name:12}{host.address:14}{cores:10}"
        print(f"{place}{host.speed:6.2f}{host.processes:11}  {host.ray}")
    print(f"{'link':26}{'rate':>14}")
    for link in lab.link_status():
        rate = "unlimited" if link.rate is None else f"{8e-6 * link.rate:g} Mbit/s"
        print(f"{link.name:26}{rate:>14}{'' if link.connected else '  cut'}")


def _terminated(*_: object) -> NoReturn:
    sys.exit(143)


def _fail(error: Exception, code: int) -> int:
    print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
    return code
