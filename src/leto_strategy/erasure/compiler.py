"""Builds gf32.c for the processor it runs on, at first use, and keeps the result in a cache. No torch here.

The cache holds one file for each source, options and set of processor features, so a home directory that
different machines share gives each its own. A file appears whole or not at all, and only one that belongs to this
user, in a folder that nobody else may write, is ever loaded.
"""

import hashlib
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).with_name("gf32.c")
COMPILERS = ("cc", "gcc", "clang")
OPTIONS = ("-O3", "-std=gnu11", "-fPIC", "-shared", "-w")
FOR_THIS_PROCESSOR = ("-march=native",)
"""Tried first; not every compiler knows it for every kind of processor."""

COMPILE_SECONDS_MAX = 60.0


@dataclass(frozen=True)
class Variant:
    """One way to compile gf32.c.

    Args:
        name: What users see.
        width: Bits of a vector of carry-less products; 0 uses none.
        features: Processor features it needs, named as in /proc/cpuinfo.
        options: Options of the compiler.
    """

    name: str
    width: int
    features: frozenset[str] = frozenset()
    options: tuple[str, ...] = ()


VARIANTS = (
    Variant("vpclmulqdq-512", 512, frozenset({"avx512f", "vpclmulqdq"}), ("-mavx512f", "-mvpclmulqdq")),
    Variant("vpclmulqdq-256", 256, frozenset({"avx2", "vpclmulqdq"}), ("-mavx2", "-mvpclmulqdq")),
    Variant("pclmulqdq-128", 128, frozenset({"avx", "pclmulqdq"}), ("-mavx", "-mpclmul")),
    Variant("plain", 0),
)
"""Fastest first. All make the same bytes."""


class BuildError(Exception):
    """There is no library; the message says why."""


def processor_features() -> frozenset[str]:
    """Names of what the processor and the system support; empty where the system does not say."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def usable_variants() -> tuple[Variant, ...]:
    """The variants that this processor runs, fastest first."""
    features = processor_features()
    return tuple(variant for variant in VARIANTS if variant.features <= features)


def find_compiler() -> str | None:
    """Path of a C compiler."""
    return next((path for name in COMPILERS if (path := shutil.which(name))), None)


def folders() -> Iterator[Path]:
    """Where libraries may be kept, best first."""
    try:
        yield Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "leto"
    except RuntimeError:  # a user without a home directory
        pass
    yield Path(tempfile.gettempdir()) / f"leto-{os.getuid()}"


def library(variant: Variant, *, places: Sequence[Path] | None = None) -> Path:
    """Path of the built library, from the cache or from the compiler.

    Args:
        variant: One that this processor runs.
        places: Folders to keep it in, best first; None: those of `folders`.

    Raises:
        BuildError: There is no compiler, it failed, or there is no folder to keep the result in.
    """
    candidates = tuple(folders() if places is None else places)
    compiler = find_compiler()
    name = _file_name(variant)
    for folder in candidates:
        if _is_safe(folder) and _is_safe(folder / name):
            return folder / name
    if compiler is None:
        raise BuildError(f"no C compiler ({', '.join(COMPILERS)}) was found")
    reasons = []
    for folder in candidates:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not _is_safe(folder):
                raise PermissionError(f"{folder} belongs to another user, or others may write to it")
            return _compile(compiler, variant, folder / name)
        except OSError as error:
            reasons.append(str(error))
    raise BuildError("no folder for the library can be written: " + "; ".join(reasons))


def _file_name(variant: Variant) -> str:
    parts = [
        SOURCE.read_bytes(),
        " ".join((*OPTIONS, *FOR_THIS_PROCESSOR, *variant.options, str(variant.width))).encode(),
    ]
    parts += [platform.machine().encode(), " ".join(sorted(processor_features())).encode()]
    return f"gf32-{variant.name}-{hashlib.sha256(b'|'.join(parts)).hexdigest()[:24]}.so"


def _is_safe(path: Path) -> bool:
    """Whether a file or folder is there, is no link, belongs to this user, and nobody else may write to it."""
    try:
        found = path.lstat()
    except OSError:
        return False
    return found.st_uid == os.getuid() and not stat.S_ISLNK(found.st_mode) and not found.st_mode & 0o022


def _compile(compiler: str, variant: Variant, target: Path) -> Path:
    """Compile into `target`.

    Raises:
        BuildError: The compiler failed.
        OSError: The folder can't be written.
    """
    descriptor, partial = tempfile.mkstemp(dir=target.parent, prefix=f".{target.stem}-", suffix=".so")
    os.close(descriptor)
    command = [compiler, *OPTIONS, *variant.options, f"-DWIDTH={variant.width}", str(SOURCE), "-o", partial]
    try:
        for more in (FOR_THIS_PROCESSOR, ()):
            result = subprocess.run(
                [*command, *more],
                capture_output=True,
                text=True,
                timeout=COMPILE_SECONDS_MAX,
                stdin=subprocess.DEVNULL,
                check=False,
            )
            if result.returncode == 0:
                os.chmod(partial, 0o700)
                os.replace(partial, target)
                return target
        raise BuildError(f"{compiler} failed: {result.stderr.strip()[-500:]}")
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"{compiler} took more than {COMPILE_SECONDS_MAX:g} s") from error
    finally:
        Path(partial).unlink(missing_ok=True)


def describe() -> tuple[bool, str]:
    """What the erasure code runs on here, without building anything: whether it is fast, and a sentence."""
    variant, compiler = usable_variants()[0], find_compiler()
    built = any(_is_safe(folder) and _is_safe(folder / _file_name(variant)) for folder in folders())
    if built:
        return True, f"C, {variant.name}, built"
    if compiler is None:
        return False, "numpy: no C compiler was found"
    return True, f"C, {variant.name}, built at first use by {compiler}"
