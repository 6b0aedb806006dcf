"""How a process was started is read from its command line, whatever the script has made of it."""

import subprocess
import sys
from pathlib import Path

import pytest

from leto_strategy.config import split_command

COMMANDS = {
    "p a.py -x --y": ([], ["a.py", "-x", "--y"]),
    "p -u -W ignore a.py -m": (["-u", "-W", "ignore"], ["a.py", "-m"]),
    "p -Wignore -X dev -OO a.py": (["-Wignore", "-X", "dev", "-OO"], ["a.py"]),
    "p -m a.b -m c": ([], ["-m", "-m", "c"]),
    "p -ma.b c": ([], ["-m", "c"]),
    "p -um a.b c": (["-u"], ["-m", "c"]),
    "p -I -c pass c": (["-I"], ["-m", "c"]),
    "p --check-hash-based-pycs never a.py": (["--check-hash-based-pycs", "never"], ["a.py"]),
    "p - c": ([], ["-", "c"]),
    "p": ([], [""]),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_is_split_as_the_interpreter_does(command: str) -> None:
    flags, argv = COMMANDS[command]
    assert split_command(command.split()) == (tuple(flags), tuple(argv))


PROBE = """
import os, sys
before = os.getcwd()
os.environ.pop("GONE")
os.makedirs("elsewhere", exist_ok=True)
os.chdir("elsewhere")
sys.argv[:] = []
from leto_strategy.config import process_start
start = process_start()
print(os.path.samefile(start.cwd, before), start.argv[1:], start.environ["GONE"])
"""


@pytest.mark.parametrize("command", [["probe.py", "--x"], ["./package/../probe.py", "--x"], ["-m", "package.p", "--x"]])
def test_a_script_that_changes_all_of_it_first_does_not_hide_it(tmp_path: Path, command: list[str]) -> None:
    (tmp_path / "package").mkdir()
    for name in ("probe.py", "package/p.py"):
        (tmp_path / name).write_text(PROBE)
    done = subprocess.run(
        [sys.executable, *command], cwd=tmp_path, env={"GONE": "no"}, capture_output=True, text=True, check=False
    )
    assert done.stdout == "True ('--x',) no\n", done.stderr
