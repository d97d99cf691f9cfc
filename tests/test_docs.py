"""Pages of the documentation whose examples are executed, and whose tables the code writes."""

import doctest
from pathlib import Path

from hspmd_page import with_rules

DOCS = Path(__file__).parent.parent / "docs"


def test_the_page_on_hspmd_runs_as_it_stands():
    options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    page = str(DOCS / "hspmd.md")
    found = doctest.testfile(page, module_relative=False, optionflags=options)
    assert (found.failed, found.attempted > 20) == (0, True)


def test_the_table_of_rules_is_the_one_of_the_code():
    page = (DOCS / "hspmd.md").read_text()
    assert with_rules(page) == page, "run scripts/hspmd_page.py"
