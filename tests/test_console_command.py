"""The console command, and the public names beside the commands' modules."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import hetjax
from hetjax.__main__ import COMMANDS, main
from hetjax.configuration import configuration_file, packaged_configurations, read_configuration
from hetjax.errors import InputError

ROOT = Path(__file__).parents[1]


def python(code: str) -> str:
    """What a fresh process prints."""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip()


@pytest.mark.parametrize(
    "code",
    [
        "import hetjax.plan; print(hetjax.plan.__module__)",
        "import hetjax.plan as plan; print(plan.__module__)",
        "import hetjax; hetjax.plan; import hetjax.plan; print(hetjax.plan.__module__)",
        "from hetjax.plan import main; import hetjax; print(hetjax.plan.__module__)",
        "import hetjax.plan; from hetjax import plan; print(plan.__module__)",
    ],
)
def test_the_function_stays_what_the_package_calls_plan(code: str):
    assert python(code) == "hetjax.planner.solving"


def test_workers_import_plans_and_no_planners():
    """They start for every run, and a second of imports is a second of each."""
    code = "import sys, hetjax.runtime.ray.ray_worker; print(*sys.modules, sep=chr(10))"
    found = set(python(code).splitlines())
    assert "hetjax.planner.plan.plan" in found
    planners = ("harp", "hap", "h2", "hexiseq", "foreign", "intra_op", "profiler")
    assert not found & {f"hetjax.planner.{each}" for each in planners}
    assert not found & {"scipy.optimize", "matplotlib", "rich"}


def test_the_commands_modules_can_be_imported_and_their_names_set():
    code = "import hetjax.train, hetjax.plan, sys; print(hetjax.train.main.__module__)"
    assert python(code) == "hetjax.train"
    assert python("import hetjax; hetjax.plan = 3; print(hetjax.plan)") == "3"


def test_the_plan_command_runs_after_the_function_was_used():
    code = (
        "import hetjax, runpy, sys; hetjax.plan; sys.argv = ['hetjax.plan', '--help']\n"
        "try: runpy.run_module('hetjax.plan', run_name='__main__')\n"
        "except SystemExit as end: assert end.code == 0"
    )
    assert "--report FILE" in python(code)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_the_parser_of_its_module(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sys, "argv", ["/usr/bin/hetjax"])
    assert main([command, "--help"]) == 0
    assert f"usage: hetjax {command} " in capsys.readouterr().out


def test_the_version_and_the_help(capsys: pytest.CaptureFixture[str]):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"hetjax {hetjax.__version__}\n"
    assert main([]) == main(["--help"]) == 0
    assert "  train " in capsys.readouterr().out


def test_an_unknown_command_is_refused(capsys: pytest.CaptureFixture[str]):
    assert main(["trian"]) == 2
    assert "did you mean 'train'" in capsys.readouterr().err


def test_a_packaged_configuration_is_found_by_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = packaged_configurations()
    assert {"quickstart", "llama_quickstart", "papers/harp/fig7a"} <= set(names)
    assert configuration_file("quickstart") == names["quickstart"]
    (tmp_path / "quickstart").write_text("train.steps = 3\n")
    assert read_configuration(configuration_file("quickstart")).train.steps == 3
    with pytest.raises(InputError, match="did you mean 'vit_quickstart'"):
        configuration_file("vit_quikstart")
    with pytest.raises(InputError, match=r"'quickstart\.gin'; there is no such file"):
        configuration_file("quickstart.gin")


@pytest.mark.slow
def test_a_wheel_trains_without_a_clone(tmp_path: Path):
    pytest.importorskip("hatchling", reason="the wheel is built by hatchling")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("hetjax-*.whl")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    venv = tmp_path / "venv" / "bin"
    install = [sys.executable, "-m", "pip", "--python", str(venv / "python"), "install", "-q"]
    subprocess.run([*install, "--no-deps", "--no-index", str(wheel)], check=True)
    # What hetjax needs is that of these tests.
    packages = sysconfig.get_path("purelib", vars={"base": str(tmp_path / "venv")})
    paths = [path for path in sys.path if path.endswith("-packages")]
    (Path(packages) / "tests.pth").write_text("\n".join(paths))

    outside = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    settings = ("train.steps = 2", "train.evaluate_every = None", "model.blocks = 1")
    bindings = [word for setting in settings for word in ("--gin", setting)]
    command = [venv / "hetjax", "train", "--config", "quickstart", "--workdir", "run", *bindings]
    ended = subprocess.run(command, cwd=tmp_path, env=outside, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert "2 steps are done" in ended.stdout
    used = (tmp_path / "run" / "config.gin").read_text()
    assert str(tmp_path / "venv") in used, "the cluster file is the wheel's"
    version = subprocess.run([venv / "hetjax", "--version"], env=outside, capture_output=True)
    assert version.stdout.decode() == f"hetjax {hetjax.__version__}\n"
    typed = [venv / "python", "-c", "import hetjax; print(hetjax.__path__[0])"]
    home = subprocess.run(typed, env=outside, cwd=tmp_path, capture_output=True, text=True)
    assert (Path(home.stdout.strip()) / "py.typed").is_file()
