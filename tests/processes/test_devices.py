"""GPUs of a job: what the fence asks their driver, and what their health ends. The driver is a stand-in."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from leto_strategy.devices.health import DeviceHealth
from leto_strategy.devices.nvml import Nvml
from leto_strategy.processes.device_watch import DeviceWatch
from leto_strategy.processes.fence import Fence
from leto_strategy.processes.loop import Loop
from tests.fake_nvml import FakeGpu, FakeNvml
from tests.processes.harness import Job

GPU_SUPERVISOR = str(Path(__file__).with_name("supervisor_with_gpus.py"))
SAID = ("names", "driver", "pids_comparable", "text")


class Watched:
    """A loop with a watch on GPUs that a test holds."""

    def __init__(self, *gpus, ordinals=(0,), environ=(), patience=5.0, **nvml):
        self.loop, self.events, self.nvml = Loop(), [], FakeNvml(*gpus, **nvml)
        self.watch = DeviceWatch(
            self.loop,
            ordinals,
            dict(environ),
            open_nvml=lambda: Nvml(self.nvml),
            patience=patience,
            emit=lambda event, **fields: self.events.append({"event": event, **fields}),
        )

    def __enter__(self):
        self.watch.start()
        return self

    def __exit__(self, *exception):
        self.watch.close()
        self.loop.close()

    def until(self, condition, seconds=5.0):
        timer = self.loop.after(seconds, lambda: pytest.fail("waited in vain"), always=True)
        while not condition():
            self.loop.turn()
        timer.cancel()

    def entered(self, *pids):
        self.watch.on_entered(pids)
        self.until(lambda: self.events)

    def gone(self, *pids):
        answers = []
        self.watch.await_gone(frozenset(pids), answers.append)
        self.until(lambda: answers)
        return answers[0]


def test_processes_are_waited_for_where_the_driver_counts_them_as_we_do():
    gpus = [FakeGpu("GPU-a", pids=[11, 99]), FakeGpu("GPU-b", pids=[12])]
    with Watched(*gpus, ordinals=(0, 1)) as watched:
        watched.entered(11, 12)
        assert watched.gone(11, 12) == {11, 12}
        gpus[0].pids.remove(11)
        assert watched.gone(11, 12) == {12}
        gpus[1].pids.clear()
        assert watched.gone(11, 12) == frozenset()
        watched.watch.on_entered([77])
        watched.gone()
    assert len(watched.events) == 1
    assert set(watched.events[0]) == {"event", *SAID}
    assert watched.events[0]["pids_comparable"] is True
    assert watched.events[0]["driver"] == "580.95.05"


def test_before_it_is_known_how_the_driver_counts_reaped_processes_are_enough():
    with Watched(FakeGpu(pids=[11])) as watched:
        assert watched.gone(11) == frozenset()
        assert watched.events == []


def test_in_another_pid_namespace_reaped_processes_are_enough():
    with Watched(FakeGpu(pids=[4711])) as watched:
        watched.entered(11)
        watched.nvml._gpus[0].pids.append(11)  # of another container
        assert watched.gone(11) == frozenset()
    assert [event["pids_comparable"] for event in watched.events] == [False]
    assert "PID namespace" in watched.events[0]["text"]


@pytest.mark.parametrize(
    ("gpus", "options", "text"),
    [
        ([], {"init_error": 12}, "NVML error 12"),
        ([FakeGpu()], {"ordinals": (3,)}, "only 1 GPU"),
        ([FakeGpu()], {"environ": {"CUDA_VISIBLE_DEVICES": "MIG-1"}}, "MIG"),
        ([FakeGpu(pids=None)], {}, "does not tell who uses"),
    ],
)
def test_without_nvml_reaped_processes_are_enough_and_the_reason_is_said(gpus, options, text):
    with Watched(*gpus, **options) as watched:
        watched.entered(11)
        assert watched.gone(11) == frozenset()
        if not gpus or options:
            assert [(item.before, item.after) for item in watched.watch.evidence()] == [(DeviceHealth(),) * 2]
    assert [event["pids_comparable"] for event in watched.events] == [None]
    assert text in watched.events[0]["text"]


def test_a_driver_that_does_not_answer_holds_nobody_up():
    with Watched(FakeGpu(pids=[11]), patience=0.05) as watched:
        watched.entered(11)
        watched.nvml._gpus[0].hangs = 0.4
        begin = time.monotonic()
        assert watched.gone(11) == frozenset()
        assert 0.05 <= time.monotonic() - begin < 0.3
        begin = time.monotonic()
        assert watched.gone(11) == frozenset()
        assert time.monotonic() - begin < 0.04, "the first answer is still due"
        assert [event["pids_comparable"] for event in watched.events] == [True, True]
        assert "does not answer" in watched.events[1]["text"]
        assert watched.watch.evidence()[0].after == DeviceHealth()
        watched.nvml._gpus[0].hangs = 0.0
        watched.until(lambda: watched.watch._num_overdue == 0)
        assert watched.gone(11) == {11}


def test_health_is_compared_from_one_recovery_to_the_next():
    fine = DeviceHealth(0, 0, remap_pending=False, remap_failed=False)
    with Watched(FakeGpu()) as watched:
        assert watched.gone() == frozenset()
        (item,) = watched.watch.evidence()
        assert (item.device, item.before, item.after) == ("cuda:0", fine, fine)
        watched.nvml._gpus[0].rows = (0, 0, 1, 0)
        watched.gone()
        watched.watch.on_recovered()
        assert watched.watch.evidence()[0].before.remap_pending
        watched.nvml._gpus[0].lost = True
        watched.gone()
        assert watched.watch.evidence()[0].after == DeviceHealth(lost=True)


def test_a_watch_that_ends_leaves_no_thread():
    with Watched(FakeGpu()) as watched:
        watched.gone()
        assert "leto-devices" in [thread.name for thread in threading.enumerate()]
    assert "leto-devices" not in [thread.name for thread in threading.enumerate()]


def fence_on(loop, watch, pids, timeout=5.0):
    calls = []
    fence = Fence(
        loop,
        pids,
        generation=0,
        spared=frozenset(),
        spared_generations=frozenset(),
        unknown_too=False,
        is_pending=lambda: False,
        others_pending=lambda: False,
        timeout=timeout,
        on_passed=lambda num: calls.append(("passed", num)),
        on_stuck=lambda what: calls.append(("stuck", what)),
        await_gone=watch.await_gone,
    )
    loop.on_reaped = fence.reaped
    return calls


def sleeper(loop):
    pid = os.posix_spawn("/bin/sleep", ["sleep", "100"], {}, setsid=True)
    loop.own(pid, lambda status: None)
    return pid


def test_a_fence_waits_until_the_driver_lists_no_dead_trainer():
    gpu = FakeGpu()
    with Watched(gpu) as watched:
        pid = sleeper(watched.loop)
        gpu.pids.append(pid)
        watched.entered(pid)
        watched.nvml.calls.clear()
        calls = fence_on(watched.loop, watched.watch, [pid])
        watched.until(lambda: watched.nvml.calls.count("processes") >= 10)
        assert not os.path.exists(f"/proc/{pid}")
        assert calls == []
        assert "errors" not in watched.nvml.calls, "health is read when the list is clear"
        gpu.pids.clear()
        watched.until(lambda: calls)
        assert calls == [("passed", 1)]
        assert "errors" in watched.nvml.calls


def test_a_fence_that_the_driver_does_not_let_pass_says_so():
    gpu = FakeGpu()
    with Watched(gpu) as watched:
        pid = sleeper(watched.loop)
        gpu.pids.append(pid)
        watched.entered(pid)
        calls = fence_on(watched.loop, watched.watch, [pid], timeout=0.1)
        watched.until(lambda: calls)
        assert calls == [("stuck", f"processes [{pid}] have ended, but keep their contexts on a GPU")]


# With a supervisor


class GpuJob(Job):
    """A job on two GPUs of which the driver is a stand-in; without state managers, which would need the real one."""

    def __init__(self, root, **options):
        self.file = root / "gpus.json"
        self.become(FakeGpu("GPU-a"), FakeGpu("GPU-b"))
        command = (GPU_SUPERVISOR, str(self.file), str(root / "trace.jsonl"))
        super().__init__(root, devices=("cuda:0", "cuda:1"), supervisor=command, needs_memory=False, **options)

    def become(self, *gpus):
        FakeNvml.write(self.file, *gpus)


def test_nobody_is_promoted_before_the_driver_has_let_go_of_the_dead(tmp_path):
    with GpuJob(tmp_path, hold=10) as job:
        devices = job.event("devices")
        assert (devices["names"], devices["pids_comparable"]) == (["cuda:0", "cuda:1"], True)
        held = Path(f"{job.file}.held")
        held.touch()
        pids = job.pids()
        job.kill(1)
        job.go()
        job.until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids), "end of the trainers")
        job.pump(0.1)
        assert job.count("fenced") == 0
        held.unlink()
        record = job.event("recovered")
        job.finished()
        assert record["phases_ms"]["reap"] >= 100
        assert set(record["health"]) == {"cuda:0", "cuda:1"}
        assert record["health"]["cuda:1"]["after"]["recovery_action"] == "none"
        assert job.count("devices") == 1


def test_new_memory_errors_end_the_job_instead_of_a_promotion(tmp_path):
    with GpuJob(tmp_path, hold=10) as job:
        job.event("devices")
        job.become(FakeGpu("GPU-a"), FakeGpu("GPU-b", errors=2))
        job.kill(1)
        job.go()
        reason = job.wait("failed")["reason"]
        for part in ("rank 1 was killed", "cuda:1: 2 uncorrectable memory errors", "last checkpoint"):
            assert part in reason
        assert job.count("promoted") == 1
        (record,) = job.end["recoveries"]
        assert record["health"]["cuda:1"]["before"]["uncorrectable_errors"] == 0
        assert record["health"]["cuda:1"]["after"]["uncorrectable_errors"] == 2
        assert record["completed"] is False
        assert job.processes() == {}


def test_contexts_that_never_end_end_the_job(tmp_path):
    with GpuJob(tmp_path, hold=10, reap_timeout=0.5) as job:
        job.event("devices")
        Path(f"{job.file}.held").touch()
        job.kill(0)
        job.go()
        reason = job.wait("failed")["reason"]
        assert "keep their contexts on a GPU within 0.5 s" in reason
        assert "reap_timeout" in reason


def test_a_machine_without_nvml_recovers_by_reaped_processes(tmp_path):
    with Job(tmp_path, devices=("cuda:0", "cuda:1"), hold=10, needs_memory=False) as job:
        assert "NVML can't be asked" in job.event("devices")["text"]
        job.kill(0)
        job.go()
        job.finished()
        assert job.end["recoveries"][0]["health"]["cuda:0"]["after"]["recovery_action"] is None


def test_on_the_cpu_the_driver_is_not_even_looked_for(tmp_path):
    with Job(tmp_path, devices=("cpu", "cpu"), hold=10) as job:
        job.event("shadow_ready")
        tasks = os.listdir(f"/proc/{job.supervisor.pid}/task")
        job.kill(0)
        job.go()
        job.finished()
        assert len(tasks) == 1
        assert job.count("devices") == 0
        assert job.end["recoveries"][0]["health"] is None


@pytest.mark.parametrize("rank", [0, 1])
def test_a_device_error_is_answered_at_once_and_its_echo_is_no_failure(tmp_path, rank):
    """The other rank reports a broken communicator as soon as the failed one is killed, or before."""
    faults = [{"at": "forward", "step": 3, "rank": rank, "generation": 0, "do": "device"}]
    faults += [{"at": "forward", "step": 3, "rank": 1 - rank, "generation": 0, "do": "communicator"}]
    with Job(tmp_path, steps=8, faults=faults, timings={"peer_grace": 30}) as job:
        failed = job.event("trainer_failed")
        job.finished()
        assert (failed["cause"], failed["rank"], failed["origin"]) == ("device", rank, "internal")
        assert "illegal memory access" in failed["report"]
        assert [record["cause"] for record in job.end["recoveries"]] == ["device"]
        assert job.end["recoveries"][0]["phases_ms"]["reap"] < 1000


def test_an_abort_by_a_watchdog_is_answered_at_once(tmp_path):
    faults = [{"at": "forward", "step": 3, "rank": 1, "generation": 0, "do": "abort"}]
    with Job(tmp_path, steps=8, faults=faults, timings={"peer_grace": 30}) as job:
        failed = job.event("trainer_failed")
        job.finished()
        assert (failed["cause"], failed["origin"]) == (signal.SIGABRT.name, "internal")
        assert len(job.end["recoveries"]) == 1
