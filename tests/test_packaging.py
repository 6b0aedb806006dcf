"""What is built holds what is promised: kernels and configuration behind the links, plugin, types, entry points."""

import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from dataclasses import fields
from importlib import metadata
from pathlib import Path

import pytest
import yaml

from leto_strategy.config import LetoConfig

ROOT = Path(__file__).resolve().parent.parent

EXPECTED = {
    "leto_strategy/__init__.py",
    "leto_strategy/py.typed",
    "leto_strategy/cli/main.py",
    "leto_strategy/triton_kernels/__init__.py",
    "leto_strategy/erasure/code.py",
    "leto_strategy/erasure/gf32.c",
    "leto_strategy/conf/__init__.py",
    "leto_strategy/conf/strategy/leto.yaml",
    "leto_strategy/conf/train.yaml",
    "leto_strategy/conf/experiment/smoke.yaml",
    "leto_strategy/pretraining/gpt.py",
    "hydra_plugins/hydra_leto/__init__.py",
    "hydra_plugins/hydra_leto/search_path.py",
}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist of this checkout, and the wheel made from that sdist, as an installer would."""
    place = tmp_path_factory.mktemp("built")
    checkout = place / "checkout"
    ignored = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__", "tests", "lightning_logs")
    shutil.copytree(ROOT, checkout, symlinks=True, ignore=ignored)
    backend = "import setuptools.build_meta as b, sys; b.build_sdist(sys.argv[1])"
    _run([sys.executable, "-c", backend, str(place)], cwd=checkout)
    (sdist,) = place.glob("*.tar.gz")
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--wheel-dir", str(place)]
    _run([sys.executable, "-m", "pip", "wheel", *options, str(sdist)], cwd=place)
    return place


def _run(command: list[str], *, cwd: Path) -> None:
    result = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=100, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_wheel_holds_kernels_configuration_plugin_and_types(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert names >= EXPECTED
    tops = {name.split("/")[0] for name in names if ".dist-info" not in name}
    assert tops == {"leto_strategy", "hydra_plugins"}, "the bare name triton_kernels belongs to another distribution"
    assert "hydra_plugins/__init__.py" not in names, "hydra_plugins is a namespace that others share"
    kernels = {f"leto_strategy/triton_kernels/{path.name}" for path in (ROOT / "triton_kernels").glob("*.py")}
    assert names >= kernels


def test_the_wheel_is_registered_with_torch_and_the_shell(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    archive = zipfile.ZipFile(wheel)
    (name,) = (name for name in archive.namelist() if name.endswith("entry_points.txt"))
    text = archive.read(name).decode()
    assert "[torch.backends]\nleto = leto_strategy.autoload:autoload" in text
    assert "[console_scripts]\nleto = leto_strategy.cli.main:main" in text
    (licence,) = (name for name in archive.namelist() if name.endswith("/LICENSE"))
    assert b"Apache License" in archive.read(licence)


def test_the_sdist_holds_files_not_links(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        members = {member.name.partition("/")[2]: member for member in archive.getmembers()}
    for name in EXPECTED:
        assert members[f"src/{name}"].isfile()


def test_the_links_are_relative_and_lead_to_the_top_level() -> None:
    for name in ("triton_kernels", "conf"):
        link = ROOT / "src" / "leto_strategy" / name
        assert link.is_symlink()
        assert str(link.readlink()) == f"../../{name}"
        assert (link / "__init__.py").samefile(ROOT / name / "__init__.py")


def test_the_yaml_has_the_options_of_the_configuration_and_their_defaults() -> None:
    values = yaml.safe_load((ROOT / "conf" / "strategy" / "leto.yaml").read_text())
    assert values.pop("_target_") == "leto_strategy.LetoStrategy"
    defaults = {field.name: getattr(LetoConfig(), field.name) for field in fields(LetoConfig)}
    assert {**values, "faults": tuple(values["faults"])} == defaults
    assert list(values) == list(defaults), "in the same order"


def test_hydra_finds_the_configuration() -> None:
    code = (
        "from hydra import compose, initialize\n"
        "with initialize(version_base=None, config_path=None):\n"
        "    print(compose(overrides=['+strategy=leto']).trainer.strategy._target_)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "leto_strategy.LetoStrategy"


def test_everything_that_gets_installed_is_pinned() -> None:
    pins = {
        _normal(line.split("==")[0])
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if line and not line.startswith("#")
    }
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    waiting = [_requirement(text) for text in (*project["dependencies"], *project["optional-dependencies"]["dev"])]
    seen = set()
    while waiting:
        name, extras = waiting.pop()
        if (name, extras) in seen or name == "leto-strategy":
            continue
        seen.add((name, extras))
        try:
            requires = metadata.requires(name) or []
        except metadata.PackageNotFoundError:  # of another platform or Python
            continue
        for text in requires:
            extra = re.search(r"extra\s*==\s*['\"]([^'\"]+)", text)
            if extra is None or _normal(extra[1]) in extras:
                waiting.append(_requirement(text))
    # A CUDA build of torch brings the vendor's libraries, each in the version that torch itself pins.
    missing = {name for name, _ in seen if name not in pins and not name.startswith(("nvidia-", "cuda-"))}
    assert not {name for name in missing if _is_installed(name)}


def _requirement(text: str) -> tuple[str, frozenset[str]]:
    match = re.match(r"([A-Za-z0-9._-]+)\s*(?:\[([^\]]*)\])?", text)
    assert match is not None
    return _normal(match[1]), frozenset(_normal(extra.strip()) for extra in (match[2] or "").split(",") if extra)


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _is_installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True
