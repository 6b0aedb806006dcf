"""Quick runs of the benchmarks, and that what they print is computed from what they measured."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.exact import ExactRows, read_rows
from benchmarks.language import shape_of

from benchmarks import harness, overhead, overhead_large, recovery

ROOT = Path(__file__).resolve().parents[2]


def run(name: str, *arguments: str, seconds: float) -> dict[str, Any]:
    """The last line that a benchmark prints, as JSON."""
    command = [sys.executable, str(ROOT / "benchmarks" / name), "--json", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_recovery_is_measured_and_exact(seed: int) -> None:
    numbers = ("--kills", "2", "--cold-kills", "1", "--no-zygote-kills", "0", "--seed", str(seed))
    found = run("recovery.py", *numbers, seconds=200)
    assert found["exact"] is True
    assert found["finished_steps_repeated"] == 0
    assert found["steps_repeated"] in (0, 1)
    assert found["seed"] == seed
    assert {kind: values["n"] for kind, values in found["spread_ms"].items()} == {
        "shadow": 2,
        "cold": 1,
        "cold_zygote_off": 0,
    }
    assert 0 < found["shadow_ms_median"] < found["cold_ms_median"] < 60_000
    assert set(found["phases_ms"]) == set(recovery.PHASES)
    assert {"cores", "cpu", "torch", "lightning", "commit", "date"} <= set(found)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_records_are_timed() -> None:
    found = run("overhead.py", "--records-only", "--steps", "20", seconds=200)
    assert 0 < found["record_ms_per_step"] < 100
    assert found["record_ms_per_step"] == max(found["record_ms_by_model"].values())
    assert found["num_steps_timed"] == {"tiny": 40, "small": 40}
    parts = found["parts_ms"]["tiny"]
    assert {"start", "mid", "words", "start.capture", "start.pack", "mid.capture.rng", "update"} <= set(parts)
    assert found["bytes"]["tiny"]["start"] > found["bytes"]["tiny"]["mid"] > 5000  # torch's generator alone has 5 KB


def test_parity_is_measured_and_exact() -> None:
    found = run("parity.py", "--quick", seconds=100)
    assert found["exact"] is True
    assert found["reconstruct_exact"] is True
    assert found["nocompiler_gbps_per_core"] > 0
    assert 0 < found["percent_of_copy"]["encode_gbps_per_core"] < 100
    by_backend = found["encode_gbps_by_variant"] | {"numpy": found["nocompiler_gbps_per_core"]}
    assert found["encode_gbps_per_core"] == by_backend[found["backend"]]
    if found["isal_gbps_per_core"] is not None:
        assert found["isal_gbps_per_core"] == max(found["isal_gbps_by_block_bytes"].values())
    assert {"cores", "cpu", "torch", "commit", "date"} <= set(found)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_kills_that_take_pages_are_exact(seed: int) -> None:
    found = run("recovery_correctness.py", "--iterations", "30", "--seed", str(seed), seconds=200)
    assert found["exact"] is True
    assert found["kills"] == found["kills_planned"] == 3
    assert found["pages_rebuilt"] > 3 * 16
    assert found["rebuild_ms"] > 0


@pytest.mark.parametrize("name", ["recovery.py", "overhead.py", "parity.py", "recovery_correctness.py"])
def test_help_is_there(name: str) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / name), "--help"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0
    assert "--json" in result.stdout


def write_run(directory: Path, steps: int, *, weights: str = "w", changed: int | None = None) -> Path:
    directory.mkdir()
    for rank in range(2):
        notes = [
            {"step": s, "loss": "0x1p-1" if s != changed or rank else "0x1p-2", "ids": [s], "weights": f"w{s}"}
            for s in range(steps)
        ]
        (directory / f"steps.r{rank}.jsonl").write_text("".join(json.dumps(note) + "\n" for note in notes))
    (directory / "result.json").write_text(json.dumps({"steps": steps, "weights": f"{weights}{steps - 1}"}))
    return directory


def test_a_killed_run_may_be_shorter_but_not_different(tmp_path: Path) -> None:
    whole = write_run(tmp_path / "whole", 9)

    def found(name: str, **options: Any) -> list[str]:
        return recovery.differences(whole, write_run(tmp_path / name, 5, **options), num_ranks=2)

    assert found("same") == []
    assert found("changed", changed=3) == ["rank 0, step 3"]
    assert found("weights", weights="v") == ["final weights, against rank 0", "final weights, against rank 1"]


def test_a_step_that_is_missing_is_a_difference(tmp_path: Path) -> None:
    whole, short = write_run(tmp_path / "whole", 9), write_run(tmp_path / "short", 5)
    lines = (short / "steps.r1.jsonl").read_text().splitlines(keepends=True)
    (short / "steps.r1.jsonl").write_text("".join(lines[:2] + lines[3:]))
    assert recovery.differences(whole, short, num_ranks=2) == ["rank 1, step 2 is missing"]


def measurement(kind: str, total_ms: float, *, level: str, repeated: int = 0) -> recovery.Measurement:
    return recovery.Measurement(kind, level, 0, 7, "redo", total_ms, 1.0, 2.0, 3.0, 4.0, 5.0, repeated, 0)


def test_medians_are_those_of_the_kind_and_level() -> None:
    shadow = [measurement("shadow", ms, level="shadow", repeated=int(ms == 90)) for ms in (70.0, 80.0, 90.0)]
    late = [measurement("shadow", 3000.0, level="cold")]  # the shadow was not there: no figure of a shadow's
    cold = [measurement("cold", ms, level="cold") for ms in (500.0, 700.0)]
    found = recovery.summarise(shadow + late + cold, ["rank 0, step 3"], {})
    assert (found["shadow_ms_median"], found["cold_ms_median"]) == (80.0, 600.0)
    assert found["cold_zygote_off_ms_median"] is None
    assert found["spread_ms"]["shadow"] == {"n": 3, "min": 70.0, "median": 80.0, "max": 90.0}
    assert (found["exact"], found["steps_repeated"], found["other_level"]) == (False, 1, 1)


def test_what_runs_between_the_records_is_not_counted() -> None:
    parts = {"start": 100_000, "mid.pack": 50_000, "words": 10_000, "fetch": 5_000}
    others = {"update": 8_000_000, "synchronise": 7_000_000, "bytes.start": 31_000}
    assert overhead.record_ms(parts | others) == pytest.approx(0.165)


def test_the_ratio_is_of_neighbouring_runs() -> None:
    times = {("leto", 0): 11.0, ("ddp", 0): 10.0, ("leto", 1): 24.0, ("ddp", 1): 20.0, ("leto", 2): 30.0}
    runs = [overhead.RunTimes("small", s, n, ms, ms, 1.0, 1.0) for (s, n), ms in times.items()]
    assert overhead.ratio(runs, "small", "step_ms") == pytest.approx(1.15)
    assert overhead.ratio(runs, "tiny", "step_ms") is None


def test_saved_rows_are_appended_and_others_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "ROOT", tmp_path)
    (tmp_path / "benchmarks").mkdir()
    for save, lines in ((False, 2), (False, 2), (True, 2), (True, 3)):
        path = harness.write_rows("speed", [{"op": "kill", "ms": 70}], {"cores": 2}, save=save)
        assert len(path.read_text().splitlines()) == lines
    assert path.read_text().splitlines()[0] == "op,ms,cores"


SMALL_GPT = ("--parameters", "1e5", "--ranks", "1", "--batch-size", "4")


@pytest.mark.nightly
@pytest.mark.timeout(400)
def test_the_benchmarks_of_a_large_model_run_on_a_small_one() -> None:
    kills = ("--kills", "2", "--cold-kills", "1", "--no-zygote-kills", "0")
    found = run("recovery.py", *SMALL_GPT, *kills, seconds=200)
    assert found["exact"] is True
    assert found["finished_steps_repeated"] == 0
    assert found["shadow_ms_median"] <= found["regained_ms_median"]
    found = run("overhead.py", *SMALL_GPT, seconds=200)
    assert set(found["step_ms"]) == {"leto", "auto"}
    assert found["slot_waits"] == {"leto, pair 0": 0, "leto, pair 1": 0, "leto, idle shadow, pair 1": 0}
    assert found["words_per_step"] >= 5


def write_rows_of(directory: Path, steps: int, *, changed: tuple[int, int] | None = None) -> Path:
    directory.mkdir()
    rows = ExactRows(directory, 0, on_gpu=False)
    weights = [torch.linspace(-1, 1, 12).view(3, 4), torch.ones(5)]
    notes = []
    for step in range(steps):
        weights[0] += 0.1
        if changed is not None and step == changed[0]:
            weights[0].view(torch.int32)[1, 2] ^= 1 << changed[1]
        rows.write(step, torch.tensor(1.0 / (step + 1)), torch.tensor([step, 7]), weights)
        notes.append(json.dumps({"step": step}) + "\n")
    (directory / "steps.r0.jsonl").write_text("".join(notes))
    (directory / "result.json").write_text(json.dumps({"steps": steps}))
    return directory


@pytest.mark.parametrize("bit", [0, 14, 15, 31])
def test_one_bit_of_one_weight_of_a_large_model_is_a_difference(tmp_path: Path, bit: int) -> None:
    whole = write_rows_of(tmp_path / "whole", 9)
    assert read_rows(whole, 0).keys() == set(range(9))
    assert recovery.differences(whole, write_rows_of(tmp_path / "same", 5), num_ranks=1) == []
    other = write_rows_of(tmp_path / "other", 5, changed=(4, bit))
    assert recovery.differences(whole, other, num_ranks=1) == ["rank 0, step 4"]


def test_a_step_of_a_large_model_that_no_stream_has_stored_is_missing(tmp_path: Path) -> None:
    whole, short = write_rows_of(tmp_path / "whole", 9), write_rows_of(tmp_path / "short", 5)
    (short / "result.json").write_text(json.dumps({"steps": 6}))
    with open(short / "steps.r0.jsonl", "a") as file:
        file.write(json.dumps({"step": 5}) + "\n")  # the host was ahead
    assert recovery.differences(whole, short, num_ranks=1) == ["rank 0, step 5 is missing"]


def test_a_gpt_has_about_as_many_parameters_as_asked() -> None:
    for wanted in (10**6, 10**8, 10**9, 3 * 10**9):
        shape = shape_of(wanted)
        found = 12 * shape["layers"] * shape["width"] ** 2 + 2 * shape["vocabulary"] * shape["width"]
        assert abs(found / wanted - 1) < 0.05
        assert shape["width"] % (2 * shape["heads"]) == 0


def test_costs_are_given_per_parameter_and_of_pairs_that_took_turns() -> None:
    def result(contender: overhead_large.Contender, pair: int, ms: float) -> overhead_large.Result:
        end = {"slot_waits": pair, "parts_ms": {"undo": 5.5, "gradient_copy": 2.0, "words": 0.4, "num_words": 67.0}}
        records = [{"start": 1_000_000, "mid": 500_000, "update": 9_000_000}] if contender.strategy == "leto" else []
        return overhead_large.Result(contender, pair, [ms - 1, ms, ms, ms + 1, ms], records, end)

    plain = overhead_large.Contender("auto", "auto")
    results = [result(overhead_large.LETO, 0, 258.0), result(plain, 0, 250.0)]
    results += [result(overhead_large.LETO, 1, 260.0), result(overhead_large.SHADOWED, 1, 260.26)]
    setting = harness.Setting("cuda", 1, num_parameters=10**9)
    found = overhead_large.summarise(results, overhead.record_ms, setting)
    assert found["step_time_ratio"] == pytest.approx(1.032)
    assert (found["added_ps_per_parameter"], found["undo_ps_per_parameter"]) == (8.0, 5.5)
    assert found["records_and_words_percent_of_step"] == pytest.approx(100 * (8.0 - 5.5 - 2.0) / 258, abs=1e-4)
    assert found["record_host_ms_per_step"] == pytest.approx(1.5)
    assert found["idle_shadow_ratio"] == pytest.approx(1.001)
    assert found["slot_waits"] == {"leto, pair 0": 0, "leto, pair 1": 1, "leto, idle shadow, pair 1": 1}
