"""Building the library, and what happens where that is not possible."""

import os
import random
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.erasure.pages_of import random_pages

from leto_strategy.erasure import backends, compiler, native, reference
from leto_strategy.erasure.bitsliced import BitslicedBackend
from leto_strategy.erasure.code import ErasureCode
from leto_strategy.erasure.compiler import BuildError

needs_compiler = pytest.mark.skipif(compiler.find_compiler() is None, reason="there is no C compiler")
PLAIN = compiler.VARIANTS[-1]


@pytest.fixture
def _chosen_again() -> Iterator[None]:
    backends.cpu_backend.cache_clear()
    yield
    backends.cpu_backend.cache_clear()


def private(path: Path) -> Path:
    path.mkdir(mode=0o700)
    return path


@needs_compiler
def test_a_library_is_built_once_and_then_taken_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "new" / "leto"
    built = compiler.library(PLAIN, places=[folder])
    assert [path.name for path in folder.iterdir()] == [built.name], "nothing partial is left"
    assert folder.stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr(compiler, "find_compiler", lambda: None)
    assert compiler.library(PLAIN, places=[folder]) == built


@needs_compiler
@pytest.mark.usefixtures("_chosen_again")
def test_with_a_compiler_the_compiled_backend_is_chosen_silently() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        chosen = backends.backend_for(torch.device("cpu"))
    assert chosen.name == f"C, {compiler.usable_variants()[0].name}"
    assert backends.cpu_backend() is chosen


@pytest.mark.usefixtures("_chosen_again")
@pytest.mark.parametrize("num_parity", [4, 16])
def test_without_a_compiler_numpy_computes_and_that_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_parity: int, rng: random.Random
) -> None:
    monkeypatch.setattr(compiler, "find_compiler", lambda: None)
    monkeypatch.setattr(compiler, "folders", lambda: iter([tmp_path]))
    data_DW = random_pages(5, 1024, rng)
    code = ErasureCode(5, num_parity, 4096)
    with pytest.warns(UserWarning, match="no C compiler"):
        parity_HW = code.encode(data_DW)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert code.verify(data_DW, parity_HW) == ()
    assert isinstance(backends.cpu_backend(), BitslicedBackend)
    assert torch.equal(parity_HW, reference.encode(data_DW, num_parity=num_parity))
    assert compiler.describe() == (False, "numpy: no C compiler was found")


@pytest.mark.usefixtures("_chosen_again")
def test_a_compiler_that_fails_is_named_with_what_it_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "cc"
    broken.write_text("#!/bin/sh\necho 'out of paper' >&2\nexit 3\n")
    broken.chmod(0o755)
    folder = private(tmp_path / "cache")
    monkeypatch.setattr(compiler, "find_compiler", lambda: str(broken))
    monkeypatch.setattr(compiler, "folders", lambda: iter([folder]))
    with pytest.warns(UserWarning, match="out of paper"):
        assert isinstance(backends.cpu_backend(), BitslicedBackend)
    assert not list(folder.iterdir())


@needs_compiler
def test_a_compiler_that_does_not_know_this_processor_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    picky = tmp_path / "cc"
    picky.write_text(f'#!/bin/sh\ncase "$*" in *native*) exit 1;; esac\nexec {compiler.find_compiler()} "$@"\n')
    picky.chmod(0o755)
    monkeypatch.setattr(compiler, "find_compiler", lambda: str(picky))
    path = compiler.library(PLAIN, places=[private(tmp_path / "cache")])
    assert native.NativeBackend(path, name="plain").name == "plain"


@needs_compiler
def test_a_cache_that_can_not_be_written_gives_way_to_the_next_folder(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    second = private(tmp_path / "second")
    assert compiler.library(PLAIN, places=[blocked / "leto", second]).parent == second
    with pytest.raises(BuildError, match="no folder for the library"):
        compiler.library(PLAIN, places=[blocked / "leto"])


@needs_compiler
@pytest.mark.parametrize("mode", [0o777, 0o720])
def test_a_folder_that_others_may_write_is_never_used(tmp_path: Path, mode: int) -> None:
    """Whoever can write there could have put a library of his own."""
    planted = private(tmp_path / "shared")
    compiler.library(PLAIN, places=[planted])
    planted.chmod(mode)
    second = private(tmp_path / "second")
    assert compiler.library(PLAIN, places=[planted, second]).parent == second
    with pytest.raises(BuildError, match="others may write"):
        compiler.library(PLAIN, places=[planted])


@needs_compiler
def test_a_link_is_never_loaded(tmp_path: Path) -> None:
    real, folder = private(tmp_path / "real"), private(tmp_path / "folder")
    built = compiler.library(PLAIN, places=[real])
    (folder / built.name).symlink_to(built)
    found = compiler.library(PLAIN, places=[folder])
    assert not found.is_symlink()


def test_a_library_that_is_none_or_counts_wrong_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "gf32.so"
    broken.write_bytes(b"\x7fELF, and then nothing")
    with pytest.raises(BuildError, match="can't be used"):
        native.NativeBackend(broken, name="broken")
    if compiler.find_compiler() is None:
        return
    source = tmp_path / "wrong.c"
    source.write_text(compiler.SOURCE.read_text().replace("0x8d", "0x8f").replace("high << 3", "high << 4"))
    monkeypatch.setattr(compiler, "SOURCE", source)
    for variant in compiler.usable_variants():
        path = compiler.library(variant, places=[private(tmp_path / variant.name)])
        with pytest.raises(BuildError, match="wrong sums"):
            native.NativeBackend(path, name="wrong")


def test_a_library_belongs_to_its_source_options_and_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {compiler._file_name(variant) for variant in compiler.VARIANTS}
    names.add(compiler._file_name(replace(PLAIN, options=("-O0",))))
    monkeypatch.setattr(compiler, "processor_features", lambda: frozenset({"sse2"}))
    names.add(compiler._file_name(PLAIN))
    assert len(names) == len(compiler.VARIANTS) + 2


@pytest.mark.parametrize(
    ("features", "names"),
    [
        ({"avx512f", "vpclmulqdq", "avx2", "avx", "pclmulqdq"}, [variant.name for variant in compiler.VARIANTS]),
        ({"vpclmulqdq", "avx2", "avx", "pclmulqdq"}, ["vpclmulqdq-256", "pclmulqdq-128", "plain"]),
        ({"avx2", "avx", "pclmulqdq", "avx512f"}, ["pclmulqdq-128", "plain"]),
        ({"asimd", "pmull"}, ["plain"]),
        (set(), ["plain"]),
    ],
)
def test_a_variant_is_used_only_where_the_processor_has_what_it_needs(
    features: set[str], names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "processor_features", lambda: frozenset(features))
    assert [variant.name for variant in compiler.usable_variants()] == names


def test_the_user_s_cache_comes_first_and_a_user_without_home_has_the_other(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.undo()
    code = "from leto_strategy.erasure import compiler; print(*compiler.folders(), sep='\\n')"

    def found(**variables: str) -> list[str]:
        environment = {name: value for name, value in os.environ.items() if name not in ("HOME", "XDG_CACHE_HOME")}
        result = subprocess.run(
            [sys.executable, "-c", code], env=environment | variables, capture_output=True, text=True, check=True
        )
        return result.stdout.split()

    temporary = str(Path(tempfile.gettempdir()) / f"leto-{os.getuid()}")
    assert found(HOME="/home/one") == ["/home/one/.cache/leto", temporary]
    assert found(HOME="/home/one", XDG_CACHE_HOME=str(tmp_path)) == [f"{tmp_path}/leto", temporary]


def test_the_torch_free_parts_load_no_torch() -> None:
    modules = "compiler, field, solve, additive_fft"
    code = f"import sys; from leto_strategy.erasure import {modules}; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"
