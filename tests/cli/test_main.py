"""The command `leto` starts quickly, loads little, and answers a wrong command line in one line."""

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from leto_strategy.cli import main

LETO = str(Path(sys.executable).with_name("leto"))
HEAVY = ("torch", "lightning", "pytorch_lightning", "numpy", "hydra", "triton")


def leto(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([LETO, *arguments], capture_output=True, text=True, timeout=30, check=False)


def test_help_lists_what_there_is_and_nothing_else() -> None:
    result = leto("--help")
    assert result.returncode == 0
    for command in ("status", "inject", "train", "doctor"):
        assert command in result.stdout
    for command in main.LATER:
        assert f"\n    {command} " not in result.stdout


@pytest.mark.parametrize("command", main.LATER)
def test_later_commands_say_what_to_do_until_then(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main([command, "script.py"]) == 2
    assert "comes with a later release" in capsys.readouterr().err


def test_nothing_heavy_is_loaded() -> None:
    code = (
        "import sys\nfrom leto_strategy.cli import main\n"
        "for arguments in (['status'], ['doctor', '--json'], ['inject', '--list-points']): main.main(arguments)\n"
        f"print('loaded', sorted(set(sys.modules) & set({HEAVY!r})))"
    )
    result = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert result.stdout.splitlines()[-1] == "loaded []"


def test_it_starts_within_150_ms() -> None:
    """Processor time, and of several starts the fastest: other things may run on the machine."""
    times = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        leto("--version")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(times) < 0.150, f"fastest start {min(times) * 1000:.0f} ms"


def test_a_reader_that_goes_away_is_no_error() -> None:
    with subprocess.Popen([LETO, "inject", "--list-points"], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0
