"""The event file: one JSON object a line, and never in the way of training."""

import json
import os

import pytest

from leto_strategy.events import EVENTS, EventLog


@pytest.fixture
def heard():
    return []


def test_one_json_object_a_line_with_the_listed_fields(tmp_path, heard):
    log = EventLog(str(tmp_path), job="j1", listener=heard.append)
    log.emit("manager_failed", rank=1, pid=7, cause="SIGKILL")
    log.emit("suspended")
    log.close()
    lines = [json.loads(line) for line in (tmp_path / "leto" / "events.jsonl").read_text().splitlines()]
    assert lines == heard
    assert [line["event"] for line in lines] == ["manager_failed", "suspended"]
    assert set(lines[0]) == {"event", "job", "time", "monotonic_ns", *EVENTS["manager_failed"]}


def test_a_line_is_there_as_soon_as_it_was_emitted(tmp_path, heard):
    log = EventLog(str(tmp_path), job="j1", listener=heard.append)
    log.emit("suspended")
    assert (tmp_path / "leto" / "events.jsonl").read_text().endswith("\n")
    log.close()


def test_jobs_append_to_the_same_file(tmp_path, heard):
    for job in ("j1", "j2"):
        log = EventLog(str(tmp_path), job=job, listener=heard.append)
        log.emit("suspended")
        log.close()
    lines = (tmp_path / "leto" / "events.jsonl").read_text().splitlines()
    assert [json.loads(line)["job"] for line in lines] == ["j1", "j2"]


def test_other_fields_than_listed_are_a_bug(tmp_path, heard):
    log = EventLog(None, job="j1", listener=heard.append)
    with pytest.raises(AssertionError):
        log.emit("suspended", rank=1)


def test_an_unwritable_directory_is_said_once(tmp_path, heard):
    (tmp_path / "leto").write_text("in the way")
    log = EventLog(str(tmp_path), job="j1", listener=heard.append)
    for _ in range(3):
        log.emit("suspended")
    assert [line["event"] for line in heard].count("warning") == 1
    assert [line["event"] for line in heard].count("suspended") == 3
    assert "Training goes on" in next(line["text"] for line in heard if line["event"] == "warning")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_a_full_disk_is_said_once(tmp_path, heard):
    (tmp_path / "leto").mkdir()
    (tmp_path / "leto" / "events.jsonl").symlink_to("/dev/full")
    log = EventLog(str(tmp_path), job="j1", listener=heard.append)
    for _ in range(3):
        log.emit("suspended")
    assert [line["event"] for line in heard].count("warning") == 1


def test_without_a_directory_only_the_listener_hears(heard):
    log = EventLog(None, job="j1", listener=heard.append)
    log.emit("suspended")
    log.close()
    assert len(heard) == 1
