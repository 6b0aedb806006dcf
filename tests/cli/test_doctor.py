"""`leto doctor` runs everywhere, and each complaint has a remedy."""

import json
import resource

import pytest

from leto_strategy.cli import doctor, main

GIB = 2**30


def test_this_machine_is_examined_without_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is True
    names = [check["name"] for check in report["checks"]]
    assert len(names) == len(set(names)) == len(doctor.CHECKS)
    assert all(check["remedy"] for check in report["checks"] if check["level"] != "ok")
    assert not [check for check in report["checks"] if "could not be checked" in check["found"]]


def test_the_table_shows_every_check(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["doctor"]) == 0
    text = capsys.readouterr().out
    for name in ("python", "torch", "lightning", "entry point", "memfd_create", "memory", "/dev/shm", "gpu"):
        assert name in text
    assert "Leto runs here" in text


def test_a_check_that_breaks_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def check_broken_thing() -> doctor.Finding:
        raise RuntimeError("no such file")

    monkeypatch.setattr(doctor, "CHECKS", (check_broken_thing, doctor.check_python))
    broken, fine = doctor.examine()
    assert (broken.name, broken.level) == ("broken thing", "warn")
    assert "no such file" in broken.found
    assert fine.level == "ok"


def test_a_failed_check_fails_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor, "CHECKS", (lambda: doctor.Finding("it", "fail", "broken", "mend it"),))
    assert main.main(["doctor"]) == 1
    text = capsys.readouterr().out
    assert "→ mend it" in text
    assert "1 of 1 checks failed" in text


@pytest.mark.parametrize(
    ("environment", "level"),
    [({}, "ok"), ({"TORCH_DEVICE_BACKEND_AUTOLOAD": "1"}, "ok"), ({"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, "warn")],
)
def test_a_switched_off_autoload_is_told(environment: dict[str, str], level: str) -> None:
    finding = doctor.autoload_finding(environment)
    assert finding.level == level
    assert level == "ok" or "import leto_strategy" in finding.remedy


def test_limits_are_judged() -> None:
    unlimited = resource.RLIM_INFINITY
    assert doctor.files_finding(1024, 1024).level == "warn"
    assert doctor.files_finding(1024, 2**20).level == "ok"
    assert doctor.files_finding(unlimited, unlimited).level == "ok"
    assert doctor.memory_finding(16 * GIB, limit=None, used=0).level == "ok"
    assert doctor.memory_finding(16 * GIB, limit=4 * GIB, used=3 * GIB).level == "warn"
    assert doctor.memory_finding(GIB, limit=None, used=0).level == "warn"
    assert doctor.shared_memory_finding(size=64 * 2**20, free=64 * 2**20).level == "warn"
    assert doctor.shared_memory_finding(size=8 * GIB, free=8 * GIB).level == "ok"
    assert doctor.gpu_finding(0).level == "ok"
    assert "later release" in doctor.gpu_finding(2).found


@pytest.mark.parametrize(
    ("name", "version", "level"),
    [
        ("torch", "2.13.0+cpu", "ok"),
        ("torch", "2.11.0", "ok"),
        ("torch", "2.9.1", "fail"),
        ("torch", None, "fail"),
        ("lightning", "2.6.6", "ok"),
        ("lightning", "2.5.0", "fail"),
        ("lightning", "3.0.0rc1", "ok"),
    ],
)
def test_versions_are_compared_as_numbers(name: str, version: str | None, level: str) -> None:
    finding = doctor._distribution(name, version)
    assert finding.level == level
    assert level == "ok" or finding.remedy.startswith("pip install")
