"""TensorBoard's event files: the events of TensorBoard's own writer, and a position to which they return."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("tensorboard")

from lightning.pytorch.loggers import TensorBoardLogger
from tests.event_reader import event_directories, first_difference
from torch.utils.tensorboard import writer as torch_writer

from leto_strategy.strategy.capture import waiting_loggers
from leto_strategy.strategy.capture.loggers import LoggerState, logger_starts, take_over
from leto_strategy.strategy.capture.packing import pack, unpack
from leto_strategy.strategy.flavour import flavour

LIGHTNING = flavour("lightning.pytorch")


class Model(torch.nn.Module):
    example_input_array = torch.ones(1, 2)

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)

    def _on_before_batch_transfer(self, batch: Any) -> Any:
        return batch

    _apply_batch_transfer_handler = _on_before_batch_transfer


def figure() -> Any:
    figures = pytest.importorskip("matplotlib.figure")
    made = figures.Figure(figsize=(1, 1))
    made.subplots().plot([0, 1])
    return made


def image() -> torch.Tensor:
    return torch.linspace(0, 1, 3 * 4 * 4).reshape(3, 4, 4)


ACTIONS: list[Callable[[Any], object]] = [
    lambda t: t.log_hyperparams({"width": 3, "kind": "a"}),
    lambda t: t.save(),
    lambda t: t.log_metrics({"loss": 1.0, "other": torch.tensor(0.5)}, 0),
    lambda t: t.experiment.add_scalars("both", {"a": 1.0, "b": 2.0}, 0),
    lambda t: t.experiment.add_image("image", image(), 1),
    lambda t: t.experiment.add_histogram("weights", torch.arange(10.0), 1),
    lambda t: t.log_metrics({"loss": 0.5}, 1),
    lambda t: t.experiment.add_text("note", "words", 2),
    lambda t: t.experiment.add_scalars("both", {"b": 3.0, "c": 4.0}, 2),
    lambda t: t.experiment.add_hparams({"lr": 0.1}, {"best": 1.0}, run_name="runs/first"),
    lambda t: t.experiment.add_figure("figure", figure(), 3),
    lambda t: t.experiment.add_embedding(torch.eye(3), metadata=["a", "b", "c"], tag="e", global_step=3),
    lambda t: t.log_hyperparams({"late": True}, metrics={"hp": 1.0}),
    lambda t: t.experiment.add_embedding(torch.eye(3), tag="f", global_step=4),
    lambda t: t.experiment.add_images("images", image()[None], 4),
    lambda t: t.finalize("success"),
    lambda t: t.log_metrics({"after": 1.0}, 5),
]


@pytest.fixture(autouse=True)
def theirs() -> Iterator[None]:
    waiting_loggers._holding = True
    original = torch_writer.EventFileWriter
    yield
    torch_writer.EventFileWriter = original
    waiting_loggers._holding = True


@pytest.fixture(scope="module", autouse=True)
def _drawn_once() -> None:
    """matplotlib keeps its fonts open from the first figure on."""
    figure().savefig(os.devnull, format="png")


def make(directory: Path, **options: Any) -> TensorBoardLogger:
    return TensorBoardLogger(directory, **{"name": "n", "version": 0, **options})


def act(logger: Any, actions: list[Callable[[Any], object]]) -> None:
    for action in actions:
        action(logger)


def require_same(expected: Path, actual: Path) -> None:
    assert first_difference(event_directories(expected), event_directories(actual)) is None
    for name in ("hparams.yaml", "projector_config.pbtxt"):
        want, have = ([(p.relative_to(d), p.read_text()) for p in sorted(d.rglob(name))] for d in (expected, actual))
        assert want == have


@pytest.mark.parametrize("options", [{}, {"sub_dir": "s", "default_hp_metric": False, "prefix": "p"}])
def test_the_events_are_those_of_tensorboards_own_writer(tmp_path: Path, options: dict[str, Any]) -> None:
    logger = make(tmp_path / "theirs", **options)
    act(logger, ACTIONS)
    logger.experiment.close()
    mine = make(tmp_path / "ours", **options)
    LoggerState([mine], logger_starts([mine], LIGHTNING, 0), LIGHTNING, is_rank_zero=True).begin()
    act(mine, ACTIONS)
    mine.experiment.close()
    require_same(tmp_path / "theirs", tmp_path / "ours")


def test_log_graph_writes_the_graph(tmp_path: Path) -> None:
    model = Model()
    stock = make(tmp_path / "theirs", log_graph=True)
    stock.experiment.add_graph(model, model.example_input_array)
    stock.experiment.close()
    mine = make(tmp_path / "ours", log_graph=True)
    state = LoggerState([mine], logger_starts([mine], LIGHTNING, 0), LIGHTNING, is_rank_zero=True)
    mine.log_graph(model)
    assert not (tmp_path / "ours").exists()
    state.begin()
    mine.experiment.add_graph(model, model.example_input_array)
    require_same(tmp_path / "theirs", tmp_path / "ours")


@pytest.mark.parametrize("kept", range(len(ACTIONS) + 1))
def test_events_written_after_the_position_come_once(tmp_path: Path, kept: int) -> None:
    """For every later place of death: the next trainer returns to the position and writes the rest."""
    undisturbed = make(tmp_path / "undisturbed")
    LoggerState([undisturbed], logger_starts([undisturbed], LIGHTNING, 0), LIGHTNING, is_rank_zero=True).begin()
    act(undisturbed, ACTIONS)
    for written in range(kept, len(ACTIONS) + 1):
        directory = tmp_path / f"killed {written}"
        starts = logger_starts([make(directory)], LIGHTNING, 0)
        dying = make(directory)
        state = LoggerState([dying], starts, LIGHTNING, is_rank_zero=True)
        state.begin()
        act(dying, ACTIONS[:kept])
        recorded = unpack(pack(state.capture()))
        act(dying, ACTIONS[kept:written])
        promoted = make(directory)
        LoggerState([promoted], starts, LIGHTNING, is_rank_zero=True).restore(recorded)
        act(promoted, ACTIONS[kept:])
        require_same(tmp_path / "undisturbed", directory)


def test_a_call_that_begins_again_leaves_the_files_of_others_alone(tmp_path: Path) -> None:
    stock = make(tmp_path)
    stock.log_metrics({"old": 1.0}, 0)
    stock.experiment.close()
    (old,) = (tmp_path / "n" / "version_0").glob("events*")
    logger = make(tmp_path)
    starts = logger_starts([logger], LIGHTNING, 0)
    for _ in range(2):
        logger = make(tmp_path)
        LoggerState([logger], starts, LIGHTNING, is_rank_zero=True).begin()
        act(logger, ACTIONS)
    files = event_directories(tmp_path)
    undisturbed = make(tmp_path / "undisturbed")
    LoggerState([undisturbed], logger_starts([undisturbed], LIGHTNING, 0), LIGHTNING, is_rank_zero=True).begin()
    act(undisturbed, ACTIONS)
    expected = event_directories(tmp_path / "undisturbed")
    assert old.exists()
    assert files["n/version_0"][1:] == expected["n/version_0"]
    assert files["n/version_0/runs/first"] == expected["n/version_0/runs/first"]


def test_loggers_below_each_other_keep_their_own_files(tmp_path: Path) -> None:
    loggers = [make(tmp_path), make(tmp_path, sub_dir="s"), make(tmp_path)]
    starts = logger_starts(loggers, LIGHTNING, 0)
    state = LoggerState(loggers, starts, LIGHTNING, is_rank_zero=True)
    state.begin()
    for i, logger in enumerate(loggers):
        logger.log_metrics({f"m{i}": 1.0}, 0)
    recorded = unpack(pack(state.capture()))
    loggers[0].log_metrics({"lost": 1.0}, 1)
    loggers = [make(tmp_path), make(tmp_path, sub_dir="s"), make(tmp_path)]
    LoggerState(loggers, starts, LIGHTNING, is_rank_zero=True).restore(recorded)
    for i, logger in enumerate(loggers):
        logger.log_metrics({f"m{i}": 2.0}, 1)
    files = event_directories(tmp_path)
    tags = {
        name: [["m0" in "".join(e), "m1" in "".join(e), "m2" in "".join(e)] for e in f] for name, f in files.items()
    }
    assert tags == {
        "n/version_0": [[True, False, False], [False, False, True]],
        "n/version_0/s": [[False, True, False]],
    }
    assert all(len(events) == 3 for file in files.values() for events in file)


def test_a_writer_kept_while_its_logger_waited_writes_later(tmp_path: Path) -> None:
    logger = make(tmp_path)
    state = LoggerState([logger], logger_starts([logger], LIGHTNING, 0), LIGHTNING, is_rank_zero=True)
    kept, add_scalar, log = logger.experiment, logger.experiment.add_scalar, logger.log_metrics
    kept.add_scalar("lost", 1.0)
    own = torch_writer.SummaryWriter(f"{logger.log_dir}/own")
    own.add_scalar("lost", 1.0)
    assert not tmp_path.joinpath("n").exists()
    state.begin()
    kept.add_scalar("a", 1.0)
    add_scalar("b", 1.0)
    log({"c": 1.0})
    own.add_scalar("d", 1.0)
    files = event_directories(tmp_path)
    assert [len(files["n/version_0"][0]), len(files["n/version_0/own"][0])] == [4, 2]
    assert "lost" not in str(files)


def test_the_users_process_writes_a_file_of_its_own_afterwards(tmp_path: Path) -> None:
    logger, trainers_own = TensorBoardLogger(tmp_path), TensorBoardLogger(tmp_path)
    waiting_loggers.hold(trainers_own)
    logger.log_hyperparams({"width": 3})
    trainers_own.log_hyperparams({"width": 3})
    state = LoggerState([trainers_own], logger_starts([logger], LIGHTNING, 0), LIGHTNING, is_rank_zero=True)
    state.begin()
    trainers_own.log_hyperparams({"depth": 4})
    trainers_own.finalize("success")
    take_over([logger], unpack(pack(state.ended())), LIGHTNING)
    assert logger.hparams == {"width": 3, "depth": 4}
    logger.log_metrics({"after": 1.0})
    logger.experiment.close()
    files = event_directories(tmp_path)["lightning_logs/version_0"]
    assert sorted([word for word in ("width", "depth", "after") if word in str(file)] for file in files) == [
        ["after"],
        ["depth"],
        ["width"],
    ]


def test_nothing_of_tensorboard_is_imported_without_its_logger() -> None:
    import subprocess
    import sys

    code = (
        "import sys; from lightning.pytorch.loggers import CSVLogger\n"
        "from leto_strategy.strategy.flavour import flavour\n"
        "from leto_strategy.strategy.capture.loggers import LoggerState, logger_starts\n"
        "f = flavour('lightning.pytorch'); l = [CSVLogger('x')]\n"
        "LoggerState(l, logger_starts(l, f, 0), f, is_rank_zero=True)\n"
        "assert not [m for m in sys.modules if m.split('.')[0] == 'tensorboard' or m == 'torch.utils.tensorboard']\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_a_subclass_with_behaviour_of_its_own_keeps_its_events_exact(tmp_path: Path) -> None:
    said: list[Any] = []

    class Own(TensorBoardLogger):
        def log_metrics(self, metrics: Any, step: int | None = None) -> None:
            said.append(step)
            super().log_metrics(metrics, step)

    starts = logger_starts([Own(tmp_path)], LIGHTNING, 0)
    assert (starts[0]["kind"], starts[0]["files"]) == ("other", "tensorboard")
    dying, promoted = Own(tmp_path), Own(tmp_path)
    state = LoggerState([dying], starts, LIGHTNING, is_rank_zero=True)
    state.begin()
    dying.log_metrics({"a": 1.0}, 0)
    recorded = unpack(pack(state.capture()))
    dying.log_metrics({"a": 2.0}, 1)
    later = LoggerState([promoted], starts, LIGHTNING, is_rank_zero=True)
    promoted.log_metrics({"never": 2.0}, 1)
    later.restore(recorded)
    promoted.log_metrics({"a": 2.0}, 1)
    (events,) = event_directories(tmp_path)["lightning_logs/version_0"]
    assert (len(events), said) == (3, [0, 1, 1])
