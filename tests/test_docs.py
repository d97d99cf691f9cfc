"""Pages whose examples are executed, whose tables the code writes; links, and what fences hold."""

import doctest
import importlib
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest
import yaml
from hspmd_page import with_rules
from kinds_page import with_kinds
from pages import code_blocks

from hetjax.file_content import from_content
from hetjax.mesh import KINDS, Cluster, Link, Subcluster
from hetjax.pipeline.schedules.warm_up import one_f_one_b
from hetjax.planner import PipelinePlan, Share, StagePlan
from hetjax.planner.plan.checks import check_pipeline

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"


def test_the_page_on_hspmd_runs_as_it_stands():
    options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    page = str(DOCS / "hspmd.md")
    with jax.numpy_dtype_promotion("standard"):  # As users have it; Optax's Adam needs it.
        found = doctest.testfile(page, module_relative=False, optionflags=options)
    assert (found.failed, found.attempted > 60) == (0, True)


def test_the_table_of_rules_is_the_one_of_the_code():
    page = (DOCS / "hspmd.md").read_text()
    assert with_rules(page) == page, "run scripts/hspmd_page.py"


def test_the_table_of_kinds_is_the_one_of_the_code():
    page = (DOCS / "clusters.md").read_text()
    assert with_kinds(page) == page, "run scripts/kinds_page.py"


def test_the_page_on_limits_runs_as_it_stands():
    found = doctest.testfile(str(DOCS / "limits.md"), module_relative=False)
    assert (found.failed, found.attempted > 8) == (0, True)


def test_the_page_on_notebooks_runs_as_it_stands():
    options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    page = str(DOCS / "notebooks.md")
    found = doctest.testfile(page, module_relative=False, optionflags=options)
    assert (found.failed, found.attempted > 25) == (0, True)


def test_the_page_on_long_sequences_runs_as_it_stands():
    found = doctest.testfile(str(DOCS / "context.md"), module_relative=False)
    assert (found.failed, found.attempted > 10) == (0, True)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site: every page is in the menu, and no link is broken."""
    if importlib.util.find_spec("mkdocs") is None:
        pytest.skip("the documentation's tools are missing")
    folder = tmp_path_factory.mktemp("site")
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return folder


def test_the_site_is_built_with_every_page_in_the_menu_and_no_broken_link(site: Path):
    assert (site / "home_laboratory" / "index.html").exists()


@pytest.mark.parametrize("home", ["hetjax", "hetjax.models", "hetjax.data"])
def test_every_public_name_is_on_the_reference_page(home: str):
    page = (DOCS / "reference" / "api.md").read_text()
    listed = re.findall(rf"^::: {re.escape(home)}\.(\w+)$", page, re.M)
    assert sorted(listed) == sorted(importlib.import_module(home).__all__)


def test_all_that_the_reference_page_names_is_public():
    page = (DOCS / "reference" / "api.md").read_text()
    for home, name in re.findall(r"^::: (\S+)\.(\w+)$", page, re.M):
        module = importlib.import_module(home)
        assert hasattr(module, name), f"{home}.{name}"
        assert name in getattr(module, "__all__", [name]), f"{home}.{name}"


def test_the_reference_page_shows_functions_where_modules_share_their_names(site: Path):
    page = (site / "reference" / "api" / "index.html").read_text()
    shared = ("hetjax.plan", "hetjax.simulate", "hetjax.reshard", "hetjax.models.image_model")
    for name in (*shared, "hetjax.models.language_model"):
        found = re.search(rf'class="doc doc-object doc-(\w+)">\s*<h3 id="{name}"', page)
        assert found is not None, name
        assert found[1] == "function", name


def test_the_reference_pages_examples_are_code(site: Path):
    page = (site / "reference" / "api" / "index.html").read_text()
    assert "<blockquote>" not in page
    assert page.count("Examples:</span>") + page.count('class="doc-section-title">Examples') > 20
    assert re.search(r'<span class="gp">&gt;&gt;&gt; </span>', page)


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


def test_the_stage_of_several_members_on_the_page_about_plans_is_one():
    titled = [b for b in code_blocks((DOCS / "plans.md").read_text()) if "members" in b.title]
    [stage] = [from_content(StagePlan, json.loads(block.text)) for block in titled]
    link = Link(1e9, 1e-5)
    parts = tuple(Subcluster(name, KINDS["T4"], 1, 2, link, link) for name in ("fast", "slow"))
    cluster = Cluster("home", parts, (("fast", "slow", link),))
    pipeline = PipelinePlan((stage,), 4, 8, one_f_one_b(1, 4))
    check_pipeline(pipeline, 3, cluster, "pipeline")
    assert stage.shares.parameters["blocks/0/up"] == Share(1, (96, 32))


@pytest.mark.parametrize("page", ["home_laboratory.md", "on_a_cluster.md"])
def test_what_pages_have_for_shells_and_in_yaml_can_be_read(page: str):
    for block in code_blocks((DOCS / page).read_text()):
        if block.language == "bash":
            read = subprocess.run(["bash", "-n"], input=block.text, capture_output=True, text=True)
            assert read.returncode == 0, f"{page}:{block.line}: {read.stderr}"
        elif block.language == "yaml":
            assert yaml.safe_load(block.text), f"{page}:{block.line}"
