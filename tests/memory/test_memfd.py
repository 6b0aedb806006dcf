"""Segments of host memory."""

import ctypes
import errno
import fcntl
import os

import pytest

from leto_strategy.errors import ResourceError
from leto_strategy.memory.memfd import MemfdBackend

MIB = 1 << 20


def test_a_segment_is_sealed_closed_on_exec_zeroed_and_takes_no_page() -> None:
    backend = MemfdBackend()
    (fd,) = backend.create(4 * MIB, label="x")
    assert not os.get_inheritable(fd)
    assert fcntl.fcntl(fd, fcntl.F_GET_SEALS) & (fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW) == 6
    for size_bytes in (0, MIB, 8 * MIB):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size_bytes)
    assert backend.committed_bytes([fd], 4 * MIB) == 0
    assert os.readlink(f"/proc/self/fd/{fd}").startswith("/memfd:leto-x")
    address = backend.map([fd], 4 * MIB, address_hint=0x2345_0000_0000, writable=True)
    assert address == 0x2345_0000_0000
    other = backend.map([fd], 4 * MIB, address_hint=address, writable=False)
    assert other != address, "a hint never replaces a mapping"
    os.close(fd)
    assert ctypes.string_at(other, 4) == bytes(4)
    ctypes.memmove(address + 4 * MIB - 4, b"leto", 4)
    assert ctypes.string_at(other + 4 * MIB - 4, 4) == b"leto"
    backend.unmap(address, 4 * MIB)
    backend.unmap(other, 4 * MIB)


def test_populate_takes_all_pages() -> None:
    backend = MemfdBackend()
    fds = backend.create(4 * MIB, label="x")
    address = backend.map(fds, 4 * MIB, address_hint=0, writable=True)
    backend.populate(address, 4 * MIB)
    assert backend.committed_bytes(fds, 4 * MIB) == 4 * MIB
    backend.unmap(address, 4 * MIB)
    os.close(fds[0])


def test_an_old_kernel_does_without_the_newest_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    original = os.memfd_create

    def old(name: str, flags: int) -> int:
        if flags & 8:
            raise OSError(errno.EINVAL, "flags")
        return original(name, flags)

    monkeypatch.setattr(os, "memfd_create", old)
    os.close(MemfdBackend().create(MIB, label="x")[0])


def test_what_the_kernel_refuses_is_a_resource_error(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = MemfdBackend()
    (fd,) = backend.create(MIB, label="x")
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ResourceError, match="map"):
        backend.map([fd], 1 << 50, address_hint=0, writable=True)
    with pytest.raises(ResourceError, match="protection"):
        backend.protect(0x2345_0000_0000, MIB, writable=True)

    def refuse(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    for module, name in ((os, "ftruncate"), (fcntl, "fcntl"), (os, "memfd_create")):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, refuse)
            with pytest.raises(ResourceError, match="ulimit -n"):
                backend.create(MIB, label="x")
    assert len(os.listdir("/proc/self/fd")) == before
    os.close(fd)
