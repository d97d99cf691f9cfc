"""The script that runs the README: what it takes for a command, and for shown output."""

import doctest
import importlib
import os
import subprocess
import sys
from pathlib import Path

import check_readme
import pytest
from check_readme import Command, missing, readme

README = Path(__file__).parents[1] / "README.md"
PAGE = """
Install:

```bash
pip install -e . && \\
  train   # a while

# Do it on cards; needs a GPU:
train --fast
```

Write `one.yaml` or `cluster.yaml`:

```yaml
name: mine
```

```bash
export A=1
plan "a # b needs c" --json
```

It prints

```text
first
...
last
```

```python
loss = ...
```

```bash
train   # needs the cards above.
```
"""


def test_examples():
    assert doctest.testmod(importlib.import_module("check_readme")).failed == 0


def test_a_page_is_commands_and_files_in_their_order():
    assert list(readme(PAGE)) == [
        Command("pip install -e . && \\\n  train   # a while", 5),
        Command("train --fast", 9, "needs a GPU"),
        ("cluster.yaml", "name: mine\n"),
        Command("export A=1", 19),
        Command('plan "a # b needs c" --json', 20, None, "first\n...\nlast\n"),
        Command("train   # needs the cards above.", 36, "needs the cards above"),
    ]


@pytest.mark.parametrize(
    ("page", "said"),
    [
        ("```\nls\n```\n", "line 2: the block does not say what it is"),
        ("```bash\nls\n", "a fence has no end"),
        ("```bash hl_lines=1\nls\n```\n", "says more than a language"),
        ("```bash\nls \\\n```\n", "line 2: the block ends inside a command"),
        ("```yaml\na: 1\n```\n", "line 2: nothing says what the file is called"),
    ],
)
def test_a_page_that_cannot_be_run_is_refused(page: str, said: str):
    with pytest.raises(ValueError, match=said):
        list(readme(page))


@pytest.mark.parametrize(
    ("shown", "first"),
    [
        ("b\nc\n", None),
        ("a\n...\nd 5 s\n", None),
        ("a\n...\nb\n", None),  # Dots may stand for nothing.
        ("a\nc\n", "a"),
        ("c\n...\nb\n", "b"),
        ("d 6 s\n", "d 6 s"),
        ("x, profile 9.1 s, search 301 ms\n", None),
        ("x, profile 9.1 s, search 301 s.\n", "x, profile, search."),
    ],
)
def test_what_is_shown_is_to_be_printed_but_for_durations(shown: str, first: str | None):
    printed = "a\nb  \nc\nd 5 s\nx, profile 120 us, search 2 s\n"
    assert missing(shown, printed) == first


def test_every_command_of_the_readme_is_found_and_the_cards_are_said_to_be_needed():
    steps = list(readme(README.read_text()))
    found = [step for step in steps if isinstance(step, Command)]
    assert [step.text.split()[0] for step in found].count("ray") == 3
    assert [step.needs for step in found if step.needs] == ["needs these cards"]
    assert any(step.figures for step in found), "what the quick start prints has moved"
    (shown,) = [step for step in found if step.shown]
    assert "llama7b_home_laboratory.gin" in shown.text
    assert [step[0] for step in steps if isinstance(step, tuple)] == ["my_cluster.yaml"]


def test_a_command_that_fails_and_one_that_prints_something_else_are_told(tmp_path: Path):
    class Stub:
        def run(self, text: str, folder: Path | None = None) -> tuple[int, str, str]:
            return (1, "", "what\nwent wrong\n") if text == "bad" else (0, "printed\n", "")

    outcomes = [
        check_readme.outcome(Stub(), command)  # pyright: ignore[reportArgumentType]
        for command in (Command("bad", 1), Command("good", 2), Command("good", 3, None, "else\n"))
    ]
    assert [each.state for each in outcomes] == ["failed", "ok", "failed"]
    assert outcomes[0].why == "exit code 1: went wrong"
    assert outcomes[2].why.endswith("from here on: else")


@pytest.mark.slow
@pytest.mark.parametrize("config", ["llama7b_home_laboratory", "quickstart"])
def test_what_the_readme_shows_and_says_of_plans_is_printed(config: str):
    """The plan command prints what the train command prints of a plan."""
    steps = [each for each in readme(README.read_text()) if isinstance(each, Command)]
    told = next(each for each in steps if config in each.text and (each.shown or each.figures))
    words = ["-m", "hetjax.plan", "--config", f"configs/{config}.gin"]
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    done = subprocess.run(
        [sys.executable, *words],
        cwd=README.parent,
        env={**environment, "COLUMNS": str(check_readme.COLUMNS)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert check_readme.untrue(told, done.stdout) is None, done.stdout
