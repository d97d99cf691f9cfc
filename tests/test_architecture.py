"""The rooms and their walls: imports point down, and nothing reaches for what is private."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "hetjax"
FILES = sorted(ROOT.rglob("*.py"))

# A room imports from rooms after it, never from those before.
ROOMS = ("commands", "runtime", "planner", "pipeline", "sharding", "mesh")
BASEMENT = frozenset({"errors", "files", "reading", "checked_files", "limits", "_compat"})


def imports(path: Path) -> list[str]:
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.append(node.module)
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def room(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_down(path):
    if room(path) not in ROOMS:
        return
    above = ROOMS[: ROOMS.index(room(path))]
    for name in imports(path):
        parts = name.split(".")
        if parts[0] == "hetjax" and len(parts) > 1:
            assert parts[1] not in above, f"{path} imports {name}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_models_and_data_know_no_runtime(path):
    if room(path) in ("models", "data"):
        used = {name.split(".")[1] for name in imports(path) if name.startswith("hetjax.")}
        assert used <= {room(path), *BASEMENT}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_private_and_no_pickle(path):
    for name in imports(path):
        assert not name.startswith("jax._src"), f"{path} imports {name}"
        assert name.split(".")[0] not in ("pickle", "cloudpickle", "dill"), f"{path} imports {name}"
        if name.startswith("jax.extend"):
            assert path.name == "_compat.py", f"{path} imports {name}; see _compat.py"
