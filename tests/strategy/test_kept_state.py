"""What users keep: attributes of submodules, metrics and modules held anywhere come back in another process."""

import time
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torchmetrics
from torch import nn

from leto_strategy.strategy.capture.kept import KeptState, give_to
from leto_strategy.strategy.capture.packing import ModuleNames, pack, unpack
from leto_strategy.strategy.capture.submodules import SubmoduleState
from leto_strategy.strategy.flavour import flavour

LIGHTNING = flavour("lightning.pytorch")

pytestmark = pytest.mark.leaks("env")  # the first AveragedModel imports torch's compiler, which sets variables


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(2, 2), nn.Dropout(0.5)
        self.temperature, self.history, self.table = 1.0, [], {"a": torch.zeros(2)}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.accuracy = torchmetrics.MeanMetric()
        self.named = {"last": self.layers[1], "n": 0}
        self.plain = [torchmetrics.CatMetric(), {"largest": torchmetrics.MaxMetric()}]


class Holder:
    """A callback with an average, made by its start hook, and a metric."""

    def __init__(self) -> None:
        self.metric = torchmetrics.SumMetric()

    def start(self, model: Model) -> None:
        self.average = torch.optim.swa_utils.AveragedModel(
            model.layers[0], multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9), use_buffers=True
        )
        self.best: Any = None


class Data:
    def __init__(self) -> None:
        self.seen = torchmetrics.MeanMetric()


def trainer() -> Any:
    torch.manual_seed(1)
    made = SimpleNamespace(
        lightning_module=Model(),
        datamodule=Data(),
        callbacks=[Holder()],
        progress_bar_callback=None,
        strategy=object(),
        fit_loop=SimpleNamespace(_combined_loader=None),
    )
    made.strategy = Data()
    return made


def started(made: Any) -> KeptState:
    state = KeptState(made, LIGHTNING)
    made.callbacks[0].start(made.lightning_module)
    state.accept_start_hooks()
    return state


def a_step(made: Any) -> None:
    model, holder = made.lightning_module, made.callbacks[0]
    layer = model.layers[1]
    layer.dropout.p *= 0.9
    layer.temperature -= 0.1
    layer.history.append(layer.temperature)
    layer.table["a"] += 1
    layer.extra = getattr(layer, "extra", 0) + 1
    model.named["n"] += 1
    model.plain[0].update(torch.tensor(float(model.named["n"])))
    model.plain[1]["largest"].update(torch.tensor(float(model.named["n"])))
    holder.metric.update(torch.tensor(2.0))
    made.datamodule.seen.update(torch.tensor(3.0))
    with torch.no_grad():
        model.layers[0].linear.weight.add_(0.5)
    holder.average.update_parameters(model.layers[0])


def look(made: Any) -> dict[str, Any]:
    model, holder = made.lightning_module, made.callbacks[0]
    layer = model.layers[1]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {
            "p": layer.dropout.p,
            "temperature": layer.temperature,
            "history": list(layer.history),
            "table": layer.table["a"].tolist(),
            "extra": getattr(layer, "extra", None),
            "n": model.named["n"],
            "cat": model.plain[0].compute(),
            "largest": model.plain[1]["largest"].compute().item(),
            "metric": holder.metric.compute().item(),
            "seen": made.datamodule.seen.compute().item(),
            "average": [t.tolist() for t in holder.average.module.state_dict().values()],
            "averaged": int(holder.average.n_averaged),
        }


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return repr(a) == repr(b)


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_all_of_it_comes_back_in_another_trainer(steps: int) -> None:
    source, target = trainer(), trainer()
    state = started(source)
    for _ in range(steps):
        state.capture()
        a_step(source)
    captured = pack(state.capture())
    then = look(source)
    a_step(source)
    promoted = started(target)
    holder = target.callbacks[0]
    average, plain = holder.average, target.lightning_module.plain
    for _ in range(2):  # what the promoted trainer did on its way is undone
        a_step(target)
        promoted.restore(unpack(captured))
        assert same(look(target), then)
    assert holder.average is average
    assert [type(metric) for metric in target.lightning_module.plain] == [type(metric) for metric in plain]
    assert target.lightning_module.named["last"] is target.lightning_module.layers[1]


def test_the_next_capture_of_a_promoted_trainer_equals_that_of_an_undisturbed_one() -> None:
    source, target = trainer(), trainer()
    state = started(source)
    a_step(source)
    captured = unpack(pack(state.capture()))
    promoted = started(target)
    promoted.restore(captured)
    for made in (source, target):
        with torch.no_grad():
            made.lightning_module.layers[0].linear.weight.fill_(1.0)
        a_step(made)
    again = trainer()
    third = started(again)
    third.restore(unpack(pack(promoted.capture())))
    assert same(look(again), look(source))


def test_the_users_process_gets_what_trainers_have_kept_and_what_they_have_made() -> None:
    source, users = trainer(), trainer()
    state = started(source)
    source.callbacks[0].best = nn.Linear(2, 2)
    for _ in range(2):
        a_step(source)
    give_to(users, LIGHTNING, state.result())
    users_holder = users.callbacks[0]
    assert users_holder.best.weight.equal(source.callbacks[0].best.weight)
    assert not hasattr(users_holder, "average"), "its averaging function is a closure, which can't be pickled"
    users_holder.average = source.callbacks[0].average
    assert same(look(users), look(source))


def test_a_module_that_is_made_meanwhile_is_carried_as_a_whole() -> None:
    source, target = trainer(), trainer()
    state = started(source)
    source.callbacks[0].best = nn.Linear(2, 2)
    captured = unpack(pack(state.capture()))
    with torch.no_grad():
        source.callbacks[0].best.weight.add_(1.0)
    later = unpack(pack(state.capture()))
    promoted = started(target)
    promoted.restore(captured)
    first = target.callbacks[0].best.weight.clone()
    promoted.restore(later)
    assert target.callbacks[0].best.weight.equal(source.callbacks[0].best.weight)
    assert not first.equal(target.callbacks[0].best.weight)


def test_a_large_module_that_a_callback_holds_is_named_once() -> None:
    made = trainer()
    made.callbacks[0].average = nn.Linear(1024, 1024)
    with pytest.warns(UserWarning, match=r"The module 'average' of Holder has 4 MiB"):
        state = KeptState(made, LIGHTNING)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state.accept_start_hooks()


@pytest.fixture
def many() -> nn.Module:
    return nn.Sequential(
        *[nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), nn.Dropout(0.1), nn.GELU()) for _ in range(40)]
    )


def test_two_hundred_submodules_cost_little(many: nn.Module) -> None:
    """Twenty microseconds on the machine where this was written; the limit leaves room for a busy one."""
    state = SubmoduleState(list(many.named_modules()), skip=(), names=ModuleNames())
    state.capture()
    seconds = []
    for _ in range(200):
        begun = time.perf_counter()
        state.capture()
        seconds.append(time.perf_counter() - begun)
    assert min(seconds) < 100e-6, f"{min(seconds) * 1e6:.0f} µs"


def test_one_changed_attribute_of_two_hundred_modules_is_found(many: Any) -> None:
    state = SubmoduleState(list(many.named_modules()), skip=(), names=ModuleNames())
    assert state.capture() == {}
    many[7][2].p = 0.3
    before = state.capture()
    assert list(before.values()) == [{"p": 0.3}]
    many[7][2].p = 0.1
    many[8][3].approximate = "tanh"
    assert list(state.capture().values()) == [{"approximate": "tanh"}]
    assert list(before.values()) == [{"p": 0.3}], "a captured state is not changed afterwards"
    del many[8][3].approximate
    assert len(state.capture()) == 1
