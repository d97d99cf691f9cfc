"""The rooms and their walls: imports point down, and nothing reaches for what is private."""

import ast
import functools
import re
from collections.abc import Iterable
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from rooms_page import CODE as ROOT
from rooms_page import PACKAGES, PAGE, PICTURE, folder, imports, picture, rooms, with_rooms

FILES = sorted(ROOT.rglob("*.py"))
BASEMENT = frozenset(
    {
        "errors",
        "files",
        "reading",
        "checked_files",
        "limits",
        "draws",
        "collecting",
        "import_when_used",
        "_compat",
    }
)

EVERY = dict.fromkeys(rooms())
"""All rooms, from the top down."""


def room(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def above(package: str, name: str) -> list[str]:
    """The modules and packages that a room's files may not import."""
    order = list(EVERY)
    upper = order[: order.index((package, name))]
    packages = list(PACKAGES)[: list(PACKAGES).index(package)]
    found = [f"hetjax.{each}" for each in packages]
    found += [f"hetjax.{each}.{inner}" for each, inner in upper if each == package]
    # The files that stand above a package's rooms.
    found += [f"hetjax.{package}.{file.stem}" for file in folder(package, "").glob("[a-z]*.py")]
    return found if name else found[: len(packages)]


@pytest.mark.parametrize(("package", "name"), EVERY, ids=".".join)
def test_imports_go_down_and_to_the_right(package: str, name: str):
    forbidden = above(package, name)
    for path in folder(package, name).glob("*.py"):
        for imported in imports(path):
            assert name == "" or imported != f"hetjax.{package}", f"{path} imports its package"
            for each in forbidden:
                assert not f"{imported}.".startswith(f"{each}."), f"{path} imports {imported}"


def module_name(path: Path) -> str:
    """What imports call a file; a package stands for its ``__init__``."""
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


def circle(files: Iterable[Path]) -> list[str]:
    """Files each of which imports the next, and the last the first; imports in functions count."""
    named = {module_name(path): imports(path) for path in files}
    try:
        TopologicalSorter({name: each & named.keys() for name, each in named.items()}).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def test_no_imports_go_in_a_circle():
    assert circle(FILES) == []


def test_every_folder_is_a_room_and_says_what_lives_there():
    found = {path.parent for path in ROOT.glob("*/**/*.py")}
    known = {folder(*each) for each in EVERY} | {folder(each, "") for each in PACKAGES}
    assert {path for path in found if "configs" not in path.parts} == known
    for package, name in EVERY:
        assert with_rooms(PAGE.read_text()).count(f"`{package}.{name}" if name else package)


def test_the_page_and_the_picture_of_the_rooms_are_of_this_code():
    assert with_rooms(PAGE.read_text()) == PAGE.read_text(), "run scripts/rooms_page.py"
    assert picture() == PICTURE.read_text(), "run scripts/rooms_page.py"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_models_and_data_know_no_runtime(path):
    if room(path) in ("models", "data"):
        used = {name.split(".")[1] for name in imports(path) if name.startswith("hetjax.")}
        assert used - {room(path), *BASEMENT} <= ({"sharding"} if room(path) == "models" else set())


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_private_and_no_pickle(path):
    for name in imports(path):
        assert not name.startswith("jax._src"), f"{path} imports {name}"
        assert name.split(".")[0] not in ("pickle", "cloudpickle", "dill"), f"{path} imports {name}"
        if name.startswith("jax.extend"):
            assert path.name == "_compat.py", f"{path} imports {name}; see _compat.py"


def names_in(path: Path) -> set[str]:
    """What a file defines: functions, classes, and methods as `Class.method`."""
    found: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = (each for each in node.body if isinstance(each, ast.FunctionDef))
            found |= {f"{node.name}.{method.name}" for method in methods}
    return found


@pytest.mark.parametrize("name", ["rooms.md", "step.md"])
def test_what_a_page_names_is_there(name: str):
    page = (PAGE.parent / name).read_text()
    named = re.findall(r"`([a-z_/]+\.py)`(?: \|)? `([^`]+)`", page)
    assert len(named) >= 25
    for path, function in named:
        assert function in names_in(ROOT / path), f"{path} has no {function}"
    for path in re.findall(r"`([a-z_/]+\.py)`", page):
        assert (ROOT / path).exists(), path


def test_no_two_classes_have_one_name():
    homes: dict[str, list[str]] = {}
    for path in FILES:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert {name: each for name, each in homes.items() if len(each) > 1} == {}


@functools.cache
def names_used(path: Path) -> frozenset[str]:
    """The names that a file reads, imports, or takes of what it has imported."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            found.add(node.id)
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.ImportFrom):
            found |= {alias.name for alias in node.names}
    return frozenset(found)


def uses_of(path: Path) -> set[str]:
    """The names used in a file, and in others of hetjax that import it.

    What a package only hands on is used where a page for users names it.
    """
    module = module_name(path)
    found, handed_on = set(names_used(path)), set[str]()
    for other in FILES:
        if module in imports(other):
            (handed_on if other.name == "__init__.py" else found).update(names_used(other))
    pages = "".join(page.read_text() for page in PAGE.parent.parent.rglob("*.md"))
    return found | {name for name in handed_on if re.search(rf"\b{name}\b", pages)}


@pytest.mark.parametrize(
    "path", sorted((ROOT / "sharding").glob("*/[a-z]*.py")), ids=lambda path: path.stem
)
def test_all_that_is_public_in_sharding_is_used(path: Path):
    """By other code of hetjax, or by people whom a page tells of it; tests do not count."""
    public = {name for name in names_in(path) if not name.startswith("_") and "." not in name}
    assert public - uses_of(path) == set()
    module = module_name(path)
    importing = [each for each in FILES if each != path and module in imports(each)]
    assert importing, f"nobody imports {module}"
