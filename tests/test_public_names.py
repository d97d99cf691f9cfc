"""Every public name is documented: what it is, its arguments, what it returns, an example."""

import importlib
import inspect

import pytest
import ray.cloudpickle as cloudpickle

PACKAGES = (
    "alignment",
    "mesh",
    "sharding",
    "pipeline",
    "planner",
    "runtime",
    "models",
    "data",
    "report",
)


def public_names() -> list[tuple[str, str]]:
    names = [("hetjax", name) for name in importlib.import_module("hetjax").__all__]
    for package in PACKAGES:
        module = importlib.import_module(f"hetjax.{package}")
        names += [(f"hetjax.{package}", name) for name in module.__all__]
    return names


def value(home: str, name: str):
    return getattr(importlib.import_module(home), name)


@pytest.mark.parametrize(("home", "name"), public_names())
def test_every_public_name_says_what_it_means(home, name):
    thing = value(home, name)
    if not (inspect.isclass(thing) or inspect.isroutine(thing)):
        return
    text = inspect.getdoc(thing)
    assert text, f"{home}.{name} has no docstring"
    first = text.splitlines()[0]
    assert first.endswith((".", ":", "!")), f"{home}.{name}: the first line is no sentence: {first}"
    if issubclass_exception(thing):
        return
    signature = inspect.signature(thing)
    arguments = [p for p in signature.parameters if p not in ("self", "args", "kwargs")]
    if arguments and not getattr(thing, "_is_protocol", False):
        assert "Args:" in text, f"{home}.{name} has arguments and no Args"
    if inspect.isroutine(thing) and signature.return_annotation not in (None, "None"):
        documented = "Returns:" in text or "Yields:" in text
        assert documented, f"{home}.{name} returns something and has no Returns"


def issubclass_exception(thing: object) -> bool:
    return inspect.isclass(thing) and issubclass(thing, Exception)


@pytest.mark.parametrize("name", importlib.import_module("hetjax").__all__)
def test_the_names_on_top_have_an_example(name):
    thing = value("hetjax", name)
    if issubclass_exception(thing):
        return
    assert ">>>" in (inspect.getdoc(thing) or ""), f"hetjax.{name} has no example"


def test_dir_lists_the_public_names():
    import hetjax

    assert dir(hetjax) == sorted(hetjax.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        hetjax.nothing  # pyright: ignore[reportAttributeAccessIssue]  # noqa: B018


def test_packages_that_import_names_when_used_are_sent_by_their_name():
    import hetjax
    from hetjax import planner

    for package in (hetjax, planner):
        sent = cloudpickle.dumps(package)  # pyright: ignore[reportPrivateImportUsage]
        assert cloudpickle.loads(sent) is package
