"""The tutorial of two PCs, run as its page says, by two hosts of a lab that know nothing else."""

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from lab import Lab, names
from labs import MARKS, NAME, NOTHING, ROOT, named_lab, traces
from pages import Block, code_blocks
from shells import Shell

PAGE = (ROOT / "docs" / "home_laboratory.md").read_text()
HOSTS = {"PC a": "a", "PC b": "b"}
BY_HAND, MEANWHILE = ", by hand", ", while it trains"

pytestmark = [
    *MARKS,
    pytest.mark.ray,
    pytest.mark.skipif(shutil.which("nft") is None, reason="the firewall wants nftables"),
]


class TwoPCs:
    """The hosts of a lab as the page's PCs: no Ray runs, each has a home and a firewall.

    Args:
        lab: the lab.
        folder: where their homes and the shared folder are.
    """

    def __init__(self, lab: Lab, folder: Path):
        self.lab, self.folder = lab, folder
        self.clone, self.shared = folder / "hetjax", folder / "shared"
        for made in (self.clone, self.shared, *(folder / host for host in HOSTS.values())):
            made.mkdir()
        (self.clone / "configs").symlink_to(ROOT / "configs")
        self._shells: list[Shell] = []

    def close(self) -> None:
        """End what runs on them."""
        for shell in self._shells:
            shell.close()
        for host in HOSTS.values():
            self.lab.kill(host)
            shutil.rmtree(self._ray_folder(host), ignore_errors=True)

    def shell(self, host: str) -> Shell:
        """A new terminal on a PC."""
        environment = {
            "HOME": str(self.folder / host),
            "LANG": "C.UTF-8",
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(ROOT),
            # The PCs share a file system, where Ray's folders would be one.
            "RAY_TMPDIR": str(self._ray_folder(host)),
        }
        command = self.lab.command(host, ["bash", "-e"])
        place = self.folder / f"terminal-{len(self._shells)}"
        self._shells.append(Shell(place, environment, self.clone, command))
        # There is no SSH between the hosts of a lab, but they see each other's files.
        self._shells[-1].run(f'scp() {{ cp "{self.folder}/a/${{1#*:}}" "$2"; }}')
        return self._shells[-1]

    def here(self, text: str) -> str:
        """A block with what is called otherwise here: addresses, and the shared folder."""
        specification = self.lab.specification
        for given, host in (("192.168.1.10", "a"), ("192.168.1.11", "b")):
            text = text.replace(given, names.address(specification, host))
        return text.replace("/shared", str(self.shared))

    def close_ports(self, allowed: dict[str, list[str]]) -> None:
        """A firewall on each PC that lets the other one in at these TCP ports alone."""
        for host, other in (("a", "b"), ("b", "a")):
            address = names.address(self.lab.specification, other)
            rules = f"""table inet firewall {{
                chain input {{
                    type filter hook input priority 0; policy drop;
                    iif lo accept
                    ct state established,related accept
                    ip saddr {address} tcp dport {{ {", ".join(allowed[host])} }} accept
                }}
            }}"""
            namespace = names.group_name(NAME, host)
            command = ["ip", "netns", "exec", namespace, "nft", "-f", "-"]
            subprocess.run(command, input=rules, text=True, check=True)

    def _ray_folder(self, host: str) -> Path:
        return Path(f"/tmp/{NAME}-{host}")  # Short: Ray's sockets are in it.


@pytest.fixture
def pcs(tmp_path: Path) -> Iterator[TwoPCs]:
    with Lab.up(named_lab("two_hosts")) as lab:
        for host in HOSTS.values():
            lab.kill(host)  # The page starts Ray itself.
        pcs = TwoPCs(lab, tmp_path)
        try:
            yield pcs
        finally:
            pcs.close()
    assert traces() == NOTHING


def open_ports(page: str) -> dict[str, list[str]]:
    """What the page's table of ports says of each PC."""
    found: dict[str, list[str]] = {host: [] for host in HOSTS.values()}
    for place, ports in re.findall(r"^\| (`[ab]`|both) \| ([\d to]+) \|", page, re.M):
        for host in HOSTS.values() if place == "both" else place.strip("`"):
            found[host].append(ports.replace(" to ", "-"))
    return found


def test_the_tutorial_of_two_pcs_runs_as_it_stands(pcs: TwoPCs):
    assert open_ports(PAGE)["b"] == ["10002-19999", "32768-60999"]
    pcs.close_ports(open_ports(PAGE))
    terminals = {host: pcs.shell(host) for host in HOSTS.values()}
    second = pcs.shell("a")
    cluster, cards, said = pcs.clone / "two_pcs.yaml", "", ""
    trained: list[str] = []
    for block in code_blocks(PAGE):
        if block.title.endswith((".yaml", ".gin")):
            (pcs.clone / block.title).write_text(block.text)
        if block.language != "bash" or block.title.endswith(BY_HAND):
            continue
        text = pcs.here(block.text)
        if block.title.endswith(MEANWHILE):
            said = second.run(text)
            assert json.loads(said)["step"] >= 1
            interrupt(terminals["a"])
        elif "ray status" in text:
            wait_for_nodes(terminals["a"], text)
        elif "big.gin" in text:
            cluster.write_text(cards)
            said = terminals["a"].run(text)
        elif "hetjax.train" in text and "--resume" not in text:
            cards = give_processors(cluster)
            terminals["a"].begin(f"{text.strip()} || test $? -eq 130")
            wait_for_steps(pcs.shared / "runs/first/metrics.jsonl", terminals["a"])
        elif "hetjax.train" in text:
            trained = resume(terminals["a"], text, pcs.shared / "runs/first/metrics.jsonl")
        else:
            said = "\n".join(terminals[host].run(text) for host in hosts_of(block))
        check(block, said)
    assert trained == [str(step) for step in range(1, len(trained) + 1)]
    stages = json.loads((pcs.shared / "runs/first/plan.json").read_text())["pipelines"][0]["stages"]
    assert sorted(stage["members"][0]["submesh"]["subcluster"] for stage in stages) == [
        "rtx3080",
        "rtx3080",
        "rtx4090",
    ]


def hosts_of(block: Block) -> list[str]:
    """The PCs that a block is for."""
    return list(HOSTS.values()) if block.title == "both PCs" else [HOSTS[block.title]]


def check(block: Block, said: str) -> None:
    """Whether a block printed what the page says of it."""
    if "ip route get" in block.text:
        assert re.search(r"dev to-b src 10\.77\.0\.1 ", said)
    if "cluster.measure" in block.text:
        rate = re.search(r"RTX4090 to RTX3080: ([\d.]+) MB/s, ", said)
        assert rate, said
        assert 15 < float(rate[1]) < 25  # The lab's link has 200 Mbit/s.
    if "big.gin" in block.text:
        assert re.search(r"rtx4090 \(1\) +does not fit", said), said
        assert re.search(r"rtx3080 \(2\) +does not fit", said), said


def wait_for_nodes(terminal: Shell, text: str) -> None:
    """The page says that both PCs are there after some seconds."""
    end = time.monotonic() + 30
    while True:
        said = terminal.run(text)
        if "1.0 hetjax:RTX4090" in said and "2.0 hetjax:RTX3080" in said and "3.0 GPU" in said:
            return
        assert time.monotonic() < end, said
        time.sleep(1)


def give_processors(cluster: Path) -> str:
    """Let the processor play the cards in a cluster file, for training; what it said before."""
    cards = cluster.read_text()
    text, count = re.subn(r"kind: RTX\d+", "kind: host-cpu", cards)
    assert count == 2
    cluster.write_text(text)
    return cards


def wait_for_steps(metrics: Path, terminal: Shell) -> None:
    end = time.monotonic() + 120
    while not (metrics.exists() and len(metrics.read_text().splitlines()) >= 3):
        assert time.monotonic() < end, terminal.said()
        time.sleep(0.2)


def interrupt(terminal: Shell) -> None:
    terminal.interrupt()
    said = terminal.end(60)
    assert re.search(r"stopped after step \d+; its checkpoint is in", said), said


def resume(terminal: Shell, text: str, metrics: Path) -> list[str]:
    """Go on for a few steps; all steps of the run by their numbers."""
    done = len(metrics.read_text().splitlines())
    said = terminal.run(f'{text.strip()} --gin "train.steps = {done + 3}"')
    assert f"{done + 3} steps are done" in said, said
    assert re.search(r"stage \d to \d", said), "the table of links"
    return [str(json.loads(line)["step"]) for line in metrics.read_text().splitlines()]
