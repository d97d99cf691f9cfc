"""Pages whose examples are executed, whose tables the code writes; links, and what fences hold."""

import doctest
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hspmd_page import with_rules
from pages import code_blocks

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"


def test_the_page_on_hspmd_runs_as_it_stands():
    options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    page = str(DOCS / "hspmd.md")
    found = doctest.testfile(page, module_relative=False, optionflags=options)
    assert (found.failed, found.attempted > 20) == (0, True)


def test_the_table_of_rules_is_the_one_of_the_code():
    page = (DOCS / "hspmd.md").read_text()
    assert with_rules(page) == page, "run scripts/hspmd_page.py"


def test_the_page_on_limits_runs_as_it_stands():
    found = doctest.testfile(str(DOCS / "limits.md"), module_relative=False)
    assert (found.failed, found.attempted > 8) == (0, True)


@pytest.mark.skipif(
    importlib.util.find_spec("mkdocs") is None, reason="the documentation's tools are missing"
)
def test_the_site_is_built_with_every_page_in_the_menu_and_no_broken_link(tmp_path: Path):
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "home_laboratory" / "index.html").exists()


def test_links_of_the_readme_lead_somewhere():
    links = re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)", (ROOT / "README.md").read_text())
    assert len(links) > 8
    for path, anchor in links:
        page = ROOT / path
        assert page.exists(), path
        if anchor:
            titles = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
            known = [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles]
            assert anchor in known, f"{path}#{anchor}"


@pytest.mark.parametrize("page", ["home_laboratory.md", "on_a_cluster.md"])
def test_what_pages_have_for_shells_and_in_yaml_can_be_read(page: str):
    for block in code_blocks((DOCS / page).read_text()):
        if block.language == "bash":
            read = subprocess.run(["bash", "-n"], input=block.text, capture_output=True, text=True)
            assert read.returncode == 0, f"{page}:{block.line}: {read.stderr}"
        elif block.language == "yaml":
            assert yaml.safe_load(block.text), f"{page}:{block.line}"
