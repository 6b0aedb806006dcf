"""What is missing leads to the slower path, and is said once: assemblers, GPUs and caches are faked here."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import triton

from leto_strategy.triton_kernels import ahead, assembler, compiler
from leto_strategy.triton_kernels.assembler import Assembler, find_assembler, ptxas_version

DEVICE = torch.device("cuda", 0)
NEW = Assembler("/new/ptxas", True, "ptxas 13.5 at /new/ptxas")
OLD = Assembler(None, False, "no ptxas of CUDA 13.3 or later: /usr/bin/ptxas (12.8)")


@pytest.fixture(autouse=True)
def _nothing_said_or_found_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for cached in (compiler.say_once, compiler._finds_clmad, compiler._cache_folder, find_assembler):
        cached.cache_clear()
    monkeypatch.setattr(compiler, "INTERPRETED", False)
    yield
    for cached in (compiler.say_once, compiler._finds_clmad, compiler._cache_folder, find_assembler):
        cached.cache_clear()


def fake_ptxas(folder: Path, body: str) -> str:
    path = folder / "ptxas"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


def banner(version: str) -> str:
    return f"echo 'ptxas: NVIDIA (R) Ptx optimizing assembler'; echo 'Cuda compilation tools, release {version}, V1'"


# the assembler


@pytest.mark.parametrize(
    ("body", "version"),
    [
        (banner("13.5"), (13, 5)),
        (banner("12.8"), (12, 8)),
        ("echo 'GNU assembler, release 13.5'", None),
        ("exit 1", None),
        ("printf '\\377\\376'", None),
    ],
)
def test_the_version_of_a_ptxas(tmp_path: Path, body: str, version: tuple[int, int] | None) -> None:
    assert ptxas_version(fake_ptxas(tmp_path, body)) == version


def test_what_is_not_there_has_no_version(tmp_path: Path) -> None:
    assert ptxas_version(str(tmp_path / "ptxas")) is None


def test_a_new_assembler_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = fake_ptxas(tmp_path, banner("13.4"))
    monkeypatch.setenv("TRITON_PTXAS_PATH", path)
    assert find_assembler() == Assembler(path, True, f"ptxas 13.4 at {path}")


@pytest.mark.parametrize(("body", "seen"), [(banner("13.2"), "13.2"), ("exit 3", "does not run")])
def test_an_old_or_wrong_assembler_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, seen: str
) -> None:
    path = fake_ptxas(tmp_path, body)
    monkeypatch.setattr(assembler, "_candidates", lambda: iter([path]))
    found = find_assembler()
    assert not found.has_clmad
    assert found.path is None
    assert f"{path} ({seen})" in found.why


def test_no_assembler_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assembler, "_candidates", lambda: iter([]))
    assert find_assembler() == Assembler(None, False, "no ptxas of CUDA 13.3 or later: none found")


# whether to multiply by clmad


@pytest.mark.parametrize(
    ("capability", "found", "fails", "why"),
    [
        ((7, 5), NEW, None, "is sm_75, clmad needs sm_80"),
        ((9, 0), OLD, None, "/usr/bin/ptxas (12.8)"),
        ((9, 0), NEW, "unknown instruction clmad", "made a kernel that fails: unknown instruction clmad"),
    ],
)
def test_integers_where_clmad_is_missing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capability: tuple[int, int], found: Assembler,
    fails: str | None, why: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(compiler, "find_assembler", lambda: found)
    monkeypatch.setattr(compiler, "_probe", lambda device: fails)
    assert not compiler.has_clmad(DEVICE)
    assert not compiler.has_clmad(DEVICE)
    assert caplog.text.count("event=slow_products") == 1
    assert why in caplog.text


def test_clmad_where_all_is_there(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(compiler, "find_assembler", lambda: NEW)
    monkeypatch.setattr(compiler, "_probe", lambda device: None)
    assert compiler.has_clmad(DEVICE)
    assert not caplog.text


def test_a_probe_with_a_wrong_product_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when an assembler accepts the instruction and makes something else of it."""

    def launch(kernel: object, grid: object, args: tuple[torch.Tensor, int, int, int], options: object) -> None:
        args[0].fill_(123)

    monkeypatch.setattr(compiler, "launch", launch)
    failure = compiler._probe(torch.device("cpu"))
    assert failure is not None
    assert "is 0x7b, not" in failure


def test_the_probe_knows_the_right_product(monkeypatch: pytest.MonkeyPatch) -> None:
    with compiler.products(clmad=False):
        monkeypatch.setattr(compiler, "INTERPRETED", True)
        launch = compiler.launch
        monkeypatch.setattr(
            compiler, "launch", lambda kernel, grid, args, options: launch(kernel, grid, args, {"CLMAD": False})
        )
        assert compiler._probe(torch.device("cpu")) is None


def test_products_can_be_forced() -> None:
    with compiler.products(clmad=True):
        assert compiler.has_clmad(DEVICE)
        with compiler.products(clmad=False):
            assert not compiler.has_clmad(DEVICE)


# the cache


def test_an_unwritable_cache_is_replaced_and_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(compiler.tempfile, "mkdtemp", lambda prefix: str(tmp_path / prefix))
    monkeypatch.setattr(compiler, "find_assembler", lambda: OLD)
    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(tmp_path / "file" / "cache")
        for _ in range(2):
            with compiler.compiling():
                assert triton.knobs.cache.dir == str(tmp_path / "leto-kernels-")
    assert caplog.text.count("event=no_kernel_cache") == 1


def test_the_assembler_is_ours_only_while_our_kernels_compile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = fake_ptxas(tmp_path, banner("13.4"))
    monkeypatch.setattr(compiler, "find_assembler", lambda: Assembler(path, True, "a new one"))
    before = triton.knobs.nvidia.ptxas.path
    with compiler.compiling():
        assert triton.knobs.nvidia.ptxas.path == path
    assert triton.knobs.nvidia.ptxas.path == before


def test_a_compiler_that_dies_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    one = ahead.Compilation("leto_strategy.triton_kernels.no_such_module:kernel", ())
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    (result,) = ahead.compile_all([one], capability=(9, 0), num_processes=1, seconds_max=60)
    assert not result["ok"]
    assert "no_such_module" in result["error"]


def test_what_takes_too_long_is_left_out() -> None:
    one = ahead.Compilation("leto_strategy.triton_kernels.no_such_module:kernel", ())
    (result,) = ahead.compile_all([one], capability=(9, 0), num_processes=1, seconds_max=0.0)
    assert result["error"] == "out of time"
