"""`leto run` executes the interpreter with the script and nothing else to be seen; errors say what to write."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from leto_strategy.cli import main, run


@pytest.fixture
def executed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What would be executed."""
    commands: list[Any] = []
    monkeypatch.setattr(run.os, "execv", lambda *command: commands.append(command))
    monkeypatch.setattr(run, "mark_program", lambda: commands.append("marked"))
    return commands


@pytest.mark.parametrize(
    "arguments", [["train.py"], ["train.py", "--job", "-m", "--", "-h"], ["-m", "package.train", "--json"]]
)
def test_the_rest_of_the_command_line_is_the_scripts(
    executed: list[Any], arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    main.main(["run", *arguments])
    assert executed == ["marked", (sys.executable, [sys.executable, *arguments])]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [([], "name a script"), (["-m"], "name a script"), (["-c", "pass"], "no option"), (["no.py"], "there is no file")],
)
def test_a_wrong_command_line_is_explained(
    executed: list[Any], arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["run", *arguments]) == 2
    assert text in capsys.readouterr().err
    assert executed == []


def test_a_torch_that_loads_no_extensions_is_named(
    executed: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    assert main.main(["run", __file__]) == 2
    assert "unset it" in capsys.readouterr().err


PROBE = """
import os, subprocess, sys
print(sorted(name for name in os.environ if "LETO" in name and "PYTEST" not in name), sys.argv, sys.orig_argv[1:])
import leto_strategy.context as context
print(context.replaces_auto())
child = "import leto_strategy.context as context; print(context.replaces_auto())"
print(subprocess.run([sys.executable, "-c", child], close_fds=False, capture_output=True, text=True).stdout.strip())
"""


def test_the_script_sees_nothing_of_it_and_its_children_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "probe.py").write_text(PROBE)
    command = [sys.executable, "-m", "leto_strategy", "run", "probe.py", "--x"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines() == ["[] ['probe.py', '--x'] ['probe.py', '--x']", "True", "False"]
    plain = subprocess.run([sys.executable, "probe.py"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert plain.stdout.splitlines()[1] == "False"
