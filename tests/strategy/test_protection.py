"""The options of the protection are checked, and nothing is silently unprotected."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from leto_strategy.config import LetoConfig
from leto_strategy.errors import ConfigurationError, UnsupportedFeatureError
from leto_strategy.strategy.updaters.choice import choose_updater
from leto_strategy.strategy.updaters.transactional import TransactionalUpdater


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"protection": "maybe"}, "protection='maybe'.: use 'on' or 'off'"),
        ({"protection": "on", "updater": "sync_snapshot"}, "only the transactional updater is protected"),
        ({"page_kib": 3}, "page_kib=3.: use a power of two from 4 to 2048"),
        ({"page_kib": 4096}, "a power of two from 4 to 2048"),
        ({"page_kib": True}, "a power of two from 4 to 2048"),
        ({"protection_pages": 0}, "protection_pages=0.: use a whole number from 1 to 1048576"),
        ({"parity_pages": 65}, "parity_pages=65.: use a whole number from 1 to 64"),
        ({"parity_pages_second": 1.5}, "parity_pages_second=1.5.: use a whole number"),
    ],
)
def test_a_wrong_option_is_refused_with_what_to_use(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        LetoConfig(**options)


@pytest.mark.parametrize(("bare", "meant"), [(True, "on"), (False, "off")])
def test_a_bare_word_of_yaml_is_understood(bare: Any, meant: str) -> None:
    assert LetoConfig(protection=bare).protection == meant


def trainer_of(module: torch.nn.Module) -> Any:
    module.automatic_optimization = True  # type: ignore[assignment]
    precision = SimpleNamespace()
    return SimpleNamespace(lightning_module=module, precision_plugin=precision, callbacks=[])


def test_what_can_not_be_protected_is_refused_with_the_reason() -> None:
    module = torch.nn.Linear(3, 3)
    optimizer = torch.optim.RMSprop(module.parameters())
    pool: Any = SimpleNamespace(on_device=False)
    with pytest.raises(UnsupportedFeatureError, match=r"protection='on'\) needs the transactional updater.*RMSprop"):
        choose_updater(LetoConfig(protection="on"), trainer_of(module), [optimizer], pool, world=1)
    updater, reason = choose_updater(LetoConfig(), trainer_of(module), [optimizer], pool, world=1)
    assert updater.protected is None
    assert "RMSprop" in str(reason)


def test_on_a_gpu_it_is_refused_and_elsewhere_said() -> None:
    module = torch.nn.Linear(3000, 3)
    optimizer = torch.optim.AdamW(module.parameters())
    config = LetoConfig(protection="on", page_kib=4, protection_pages=16)
    with pytest.raises(UnsupportedFeatureError, match="not possible on a GPU yet"):
        TransactionalUpdater(config, module, optimizer, SimpleNamespace(on_device=True), world=1)  # type: ignore[arg-type]
    pool: Any = SimpleNamespace(on_device=False)
    said = TransactionalUpdater(config, module, optimizer, pool, world=1).protected
    assert said is not None
    assert "any 16 pages of which can be rebuilt" in said
    assert TransactionalUpdater(LetoConfig(), module, optimizer, pool, world=1).protected is None
