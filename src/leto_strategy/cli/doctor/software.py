"""Checks of the interpreter and the installed packages."""

import os
import platform
import sys
from collections.abc import Mapping
from importlib import metadata

from leto_strategy.cli.doctor.finding import Finding
from leto_strategy.erasure import compiler

OLDEST = {"torch": (2, 11), "lightning": (2, 6), "pytorch-lightning": (2, 6)}


def check_system() -> Finding:
    """Linux on 64 bit, because of memfd, pidfd and /proc."""
    found = f"{platform.system()} {platform.release()} {platform.machine()}"
    if not sys.platform.startswith("linux") or sys.maxsize < 2**32:
        return Finding("system", "fail", found, "Leto needs 64-bit Linux")
    return Finding("system", "ok", found)


def check_python() -> Finding:
    """Which Python this is; one that is too old does not get here."""
    found = f"{platform.python_implementation()} {platform.python_version()} ({sys.executable})"
    return Finding("python", "ok", found)


def check_torch() -> Finding:
    """A torch that is new enough."""
    return distribution_finding("torch", installed("torch"))


def check_lightning() -> Finding:
    """Either of the two distributions of Lightning."""
    versions = {name: version for name in ("lightning", "pytorch-lightning") if (version := installed(name))}
    if not versions:
        return Finding("lightning", "fail", "not installed", "pip install 'lightning>=2.6'")
    findings = [distribution_finding(name, version) for name, version in versions.items()]
    worst = max(findings, key=lambda finding: ("ok", "warn", "fail").index(finding.level))
    return Finding("lightning", worst.level, ", ".join(f.found for f in findings), worst.remedy)


def check_entry_point() -> Finding:
    """The entry point through which torch makes the name "leto" known."""
    points = [point for point in metadata.entry_points(group="torch.backends") if point.name == "leto"]
    if not points:
        return Finding(
            "entry point",
            "fail",
            'the installed packages have none: strategy="leto" is unknown unless leto_strategy is imported',
            "install the package (pip install leto-strategy, or pip install -e . in a checkout)",
        )
    return Finding("entry point", "ok", f"torch.backends: leto = {points[0].value}")


def check_autoload() -> Finding:
    """`TORCH_DEVICE_BACKEND_AUTOLOAD=0` switches that entry point off."""
    return autoload_finding(os.environ)


def autoload_finding(environment: Mapping[str, str]) -> Finding:
    """Pure part of `check_autoload`."""
    value = environment.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1")
    if value == "1":
        return Finding("autoload", "ok", "torch loads the entry points of torch.backends")
    return Finding(
        "autoload",
        "warn",
        f'TORCH_DEVICE_BACKEND_AUTOLOAD={value}: torch ignores the entry point, the name "leto" is not registered',
        "unset the variable, or write `import leto_strategy` in the script",
    )


def installed(name: str) -> str | None:
    """Version of a distribution, None where it is not there."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def distribution_finding(name: str, version: str | None) -> Finding:
    """Pure part of `check_torch` and `check_lightning`."""
    wanted = ".".join(map(str, OLDEST[name]))
    if version is None:
        return Finding(name, "fail", "not installed", f"pip install '{name}>={wanted}'")
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit())
    if numbers < OLDEST[name]:
        return Finding(name, "fail", f"{name} {version}", f"pip install '{name}>={wanted}'")
    return Finding(name, "ok", f"{name} {version}")


def check_erasure_code() -> Finding:
    """What computes parity in host memory: compiled code, or numpy, which makes the same bytes slower."""
    fast, found = compiler.describe()
    if not fast:
        return Finding("erasure code", "warn", found, "install a C compiler (cc, gcc or clang): ten times faster")
    return Finding("erasure code", "ok", found)
