"""The layers hold: as the import linter reads the source, and as processes find it when they run."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "leto_strategy"

HEAVY = ("torch", "lightning", "pytorch_lightning", "numpy", "hydra", "triton")

FOR_TRAINERS = {"memory/dlpack.py", "memory/tensors.py"}

DAEMON_MODULES = sorted(
    str(path.relative_to(SOURCE).with_suffix("")).replace("/", ".")
    for folder in (".", "devices", "memory", "recovery", "processes", "cli", "cli/doctor")
    for path in (SOURCE / folder).glob("[!_]*.py")
    if str(path.relative_to(SOURCE)) not in FOR_TRAINERS
)
"""Supervisor, managers, the command line and all that they may import. `autoload` runs inside `import torch`: it must
not import it either."""

ENVIRONMENT_READERS = {"config.py"}
"""The only files that may look up a LETO_* variable of their own process."""


def test_the_import_linter_is_content() -> None:
    linter = Path(sys.executable).with_name("lint-imports")
    result = subprocess.run([linter], cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("module", DAEMON_MODULES)
def test_a_daemon_module_loads_nothing_heavy(module: str) -> None:
    code = (
        f"import sys, leto_strategy.{module}\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules], file=sys.stdout)"
    )
    result = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "[]"


def test_only_the_configuration_reads_our_environment_variables() -> None:
    readers = {
        str(path.relative_to(SOURCE))
        for path in _files()
        for node in ast.walk(ast.parse(path.read_text()))
        if _reads_our_variable(node)
    }
    assert readers <= ENVIRONMENT_READERS


def test_imports_are_absolute() -> None:
    relative = {
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in _files()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.level
    }
    assert not relative


def test_every_module_says_what_it_owns() -> None:
    silent = {str(path.relative_to(ROOT)) for path in _files() if not ast.get_docstring(ast.parse(path.read_text()))}
    assert not silent


def _files() -> list[Path]:
    return [
        Path(folder) / name
        for folder, _, names in os.walk(SOURCE, followlinks=True)
        for name in names
        if name.endswith(".py")
    ]


def _reads_our_variable(node: ast.AST) -> bool:
    """`os.environ["LETO_X"]`, `os.environ.get("LETO_X")`, `.pop`, `os.getenv`, with a literal name."""
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
        where, name = node.value, node.slice
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
        if node.func.attr not in {"get", "pop", "getenv", "setdefault"}:
            return False
        where, name = node.func, node.args[0]
    else:
        return False
    source = ast.unparse(where)
    literal = isinstance(name, ast.Constant) and isinstance(name.value, str) and name.value.startswith("LETO_")
    constant = isinstance(name, ast.Name) and name.id in {"JOB_VARIABLE", "TRAINER_VARIABLE"}
    return (literal or constant) and ("environ" in source or "getenv" in source)
