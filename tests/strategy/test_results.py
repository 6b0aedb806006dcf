"""The result file of a call: written once, read by all trainers of later calls at the same time."""

import os
import sys
import traceback

import torch

from leto_strategy.strategy.launch.results import read_result, write_result


def test_processes_that_share_a_descriptor_read_the_whole_result_at_the_same_time() -> None:
    fd = os.memfd_create("result")
    tensors = {str(i): torch.full((1000,), float(i)) for i in range(50)}
    write_result(fd, {"tensors": tensors})
    children = []
    for _ in range(4):
        pid = os.fork()
        if pid == 0:
            try:
                for _ in range(20):
                    found = read_result(fd)["tensors"]
                    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
                os._exit(0)
            except BaseException:
                traceback.print_exc(file=sys.stderr)
                os._exit(1)
        children.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in children] == [0, 0, 0, 0]
    os.close(fd)


def test_a_result_replaces_a_longer_one() -> None:
    fd = os.memfd_create("result")
    write_result(fd, {"tensor": torch.zeros(10_000)})
    write_result(fd, {"tensor": torch.ones(1)})
    assert read_result(fd)["tensor"].tolist() == [1.0]
    os.close(fd)
