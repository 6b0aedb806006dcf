"""Builds `LetoStrategy` for one of Lightning's two distributions.

The class only says where in Lightning's life cycle things happen; what happens is in `session` (a trainer's fit),
`launcher` (processes) and the modules below them. It subclasses `DDPStrategy`, because Lightning injects samplers by
that, but wraps nothing in DistributedDataParallel.
"""

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from leto_strategy.config import LetoConfig, trainer_identity
from leto_strategy.errors import UnsupportedFeatureError
from leto_strategy.progress import Activity
from leto_strategy.recovery.decision import Mode
from leto_strategy.strategy.capture.loggers import LoggerState
from leto_strategy.strategy.capture.snapshot import FitSnapshot
from leto_strategy.strategy.flavour import Flavour
from leto_strategy.strategy.launch.checks import check_interactive
from leto_strategy.strategy.launch.launcher import build_launcher
from leto_strategy.strategy.launch.trainer import TrainerSide, hush
from leto_strategy.strategy.loaders import generators_of, make_resumable
from leto_strategy.strategy.session import FitSession

_DDP_OPTIONS = {
    "accelerator", "parallel_devices", "cluster_environment", "checkpoint_io", "precision_plugin",
    "process_group_backend", "timeout",
}  # fmt: skip
_DDP_LATER = {
    "ddp_comm_state", "ddp_comm_hook", "ddp_comm_wrapper", "model_averaging_period", "static_graph", "start_method",
}  # fmt: skip
_DDP_NO_EFFECT = {"gradient_as_bucket_view", "broadcast_buffers", "init_sync"}


def build_strategy(flavour: Flavour, module_name: str) -> Any:
    """The strategy class of a distribution, to be bound to the name `LetoStrategy` of the module `module_name`."""
    ddp = flavour.pytorch("strategies").DDPStrategy
    launcher_class = build_launcher(flavour)

    class LetoStrategy(ddp):  # type: ignore[misc, valid-type]
        """Data-parallel training that recovers from failures in place, bit for bit.

        Args:
            parallel_devices: As in DDPStrategy.
            cluster_environment: As in DDPStrategy.
            checkpoint_io: As in DDPStrategy.
            precision_plugin: As in DDPStrategy.
            process_group_backend: As in DDPStrategy.
            timeout: As in DDPStrategy: how long a collective may take.
            **options: Options of `leto_strategy.config.LetoConfig`.

        Raises:
            ConfigurationError: An unknown option or a value that can't be.
        """

        strategy_name = "leto"

        def __init__(self, **options: Any) -> None:
            LetoConfig.reject_unknown(set(options), also=_DDP_OPTIONS | _DDP_LATER | _DDP_NO_EFFECT)
            for name in _DDP_LATER & set(options):
                if options.pop(name) not in (None, False, "popen"):
                    raise UnsupportedFeatureError(f"LetoStrategy({name}=...) is not supported yet; leave it out.")
            for name in _DDP_NO_EFFECT:
                options.pop(name, None)
            names = set(LetoConfig.option_names())
            values = {name: options.pop(name) for name in list(options) if name in names}
            if "faults" in values:
                values["faults"] = tuple(values["faults"])
            self.leto = LetoConfig(**values)
            super().__init__(**options)
            self.recoveries: list[dict[str, Any]] = []
            self.side: TrainerSide | None = None
            self._session: FitSession | None = None
            self._remembered: dict[str, Any] = {}
            self._logger_state: LoggerState | None = None

        def __getstate__(self) -> dict[str, Any]:
            state = self.__dict__.copy()
            for name in ("_launcher", "side", "_session", "_logger_state"):
                state[name] = None
            return state

        @classmethod
        def register_strategies(cls, strategy_registry: Any) -> None:
            """Nothing to do: the name is registered when Lightning is imported."""

        def _configure_launcher(self) -> None:
            if trainer_identity() is None:
                check_interactive()
            else:
                hush(flavour.name)
            self._launcher = launcher_class(self)

        # What the user's process sees after a call.

        def remember_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            """Keep optimizer and scheduler states of an ended fit until somebody asks for the optimizers."""
            self._remembered = checkpoint
            self._optimizers: list[Any] = []
            self._lightning_optimizers: list[Any] = []
            self._schedulers: list[Any] = []

        def _rebuild_optimizers(self) -> None:
            remembered, self._remembered = self._remembered, {}
            self.setup_optimizers(self.lightning_module.trainer)
            for optimizer, state in zip(self._optimizers, remembered["optimizers"], strict=True):
                optimizer.load_state_dict(state)
            for config, state in zip(self._schedulers, remembered["schedulers"], strict=True):
                config.scheduler.load_state_dict(state)

        @property
        def optimizers(self) -> list[Any]:
            """The optimizers; rebuilt on first use in the user's process after a fit."""
            if self._remembered:
                self._rebuild_optimizers()
            return self._optimizers

        @optimizers.setter
        def optimizers(self, optimizers: list[Any]) -> None:
            ddp.optimizers.fset(self, optimizers)

        @property
        def lr_scheduler_configs(self) -> list[Any]:
            """The schedulers; rebuilt on first use in the user's process after a fit."""
            if self._remembered:
                self._rebuild_optimizers()
            return self._schedulers

        @lr_scheduler_configs.setter
        def lr_scheduler_configs(self, configs: list[Any]) -> None:
            self._schedulers = configs

        # Set-up of a trainer.

        def setup_distributed(self) -> None:
            """Join the process group of this generation, whose store listens on a socket from the supervisor."""
            flavour.fabric_module("utilities.seed").reset_seed()
            self.set_world_ranks()
            self._process_group_backend = self._get_process_group_backend()
            assert self.side is not None, "only a trainer process trains"
            self.side.join(self._process_group_backend, self._timeout)

        def setup(self, trainer: Any) -> None:
            """Prepare everything, wait to be promoted, and take over."""
            assert self.side is not None
            if trainer.state.fn != "fit":
                self.side.wait_for_promotion()
                assert self.side.loggers is not None
                self.side.loggers.restore(self.side.logger_positions)
                super().setup(trainer)
                return
            self.accelerator.setup(trainer)
            self.model: Any = self.precision_plugin.convert_module(self.lightning_module)
            self.model_to_device()
            self.setup_optimizers(trainer)
            if len(self._optimizers) != 1:
                raise UnsupportedFeatureError(
                    f"strategy='leto' needs one optimizer; configure_optimizers returned {len(self._optimizers)}."
                )
            session = FitSession(self.side.identity, self.leto, self.lightning_module, self._optimizers[0])
            self.setup_precision_plugin()
            self._training_generators: list[torch.Generator] = []
            self._evaluation_generators: list[torch.Generator] = []
            loggers = self.side.loggers
            assert loggers is not None
            session.snapshot = FitSnapshot(
                trainer, flavour, loggers, lambda: [*self._training_generators, *self._evaluation_generators]
            )
            self._session = session
            self._connect_ranks()
            order = self.side.wait_for_promotion()
            session.promoted(order["mode"], order["step"], self.side.entered)
            if order["mode"] == Mode.FRESH:
                loggers.restore(self.side.logger_positions)
                self._sync_module_states()
            else:
                self._enter_in_the_middle(trainer, session)
            self._intercept(trainer, session)

        def _connect_ranks(self) -> None:
            """A first collective connects the ranks now, not in the first step after a promotion."""
            if self.num_processes > 1:
                dist.all_reduce(torch.zeros(1, device=self.root_device))

        def _sync_module_states(self) -> None:
            """All ranks begin with rank 0's parameters and buffers, as with DistributedDataParallel."""
            if self.num_processes > 1:
                flavour.pytorch("strategies.ddp")._sync_module_states(self.lightning_module)

        def _enter_in_the_middle(self, trainer: Any, session: FitSession) -> None:
            trainer._checkpoint_connector._loaded_checkpoint = {}
            trainer.enable_autolog_hparams = False

            def enter() -> None:
                session.enter_resumed_step()
                bar = trainer.progress_bar_callback
                if bar is not None:
                    bar.on_train_epoch_start(trainer, trainer.lightning_module)

            assert session.snapshot is not None
            session.snapshot.position.enter_epoch(session.start_record()["snapshot"]["position"], enter)

        def _intercept(self, trainer: Any, session: FitSession) -> None:
            optimization = trainer.fit_loop.epoch_loop.automatic_optimization
            make_closure: Callable[..., Any] = optimization._make_closure
            result_class = flavour.pytorch("loops.optimization.automatic").ClosureResult

            def remember_closure(*args: Any, **kwargs: Any) -> Any:
                self._closure = make_closure(*args, **kwargs)
                session.quieten(self._closure, result_class)
                return self._closure

            optimization._make_closure = remember_closure
            optimizer = self._optimizers[0]
            if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
                raise UnsupportedFeatureError(
                    "strategy='leto' does not run hooks registered with Optimizer.register_step_pre_hook or"
                    " register_step_post_hook; use LightningModule.optimizer_step."
                )

            def step(closure: Callable[[], Any] | None = None) -> Any:
                if closure is None:
                    raise UnsupportedFeatureError(
                        "strategy='leto' needs optimizer.step(closure=...), as Lightning calls it."
                    )
                optimizer._opt_called = True
                return session.update(closure, self._closure, result_class)

            step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # schedulers ask whether they came first
            optimizer.step = step
            end_epoch: Callable[[], None] = trainer.fit_loop.on_advance_end

            def on_advance_end() -> None:
                session.reach("epoch_end", session.step)
                end_epoch()

            trainer.fit_loop.on_advance_end = on_advance_end
            checkpoint_class = flavour.pytorch("callbacks").ModelCheckpoint
            for callback in trainer.callbacks:
                if isinstance(callback, checkpoint_class):
                    session.journal.watch(callback)

        def on_train_start(self) -> None:
            """After the start hooks: parameters become retained memory."""
            if self._session is not None:
                self._session.attach()

        def process_dataloader(self, dataloader: Any) -> Any:
            """Make a training loader resumable, and reopen it where a record says."""
            trainer = self.lightning_module.trainer
            session = self._session
            if session is None:
                return dataloader
            if not trainer.training:
                self._evaluation_generators += generators_of(dataloader)
                return dataloader
            if session.loaders:
                raise UnsupportedFeatureError("strategy='leto' does not support several training loaders yet; use one.")
            make_resumable(dataloader)
            state = dataloader.leto
            session.loaders.append(state)
            state.before_fetch = session.before_fetch
            self._training_generators += state.generators
            if session.resuming:
                start = session.start_record()
                epoch = trainer.fit_loop.epoch_progress.current.processed
                flavour.fabric_module("utilities.data")._set_sampler_epoch(dataloader, epoch)
                state.reopen(start["loaders"][0])
            return dataloader

        # A training step.

        def batch_to_device(self, batch: Any, device: Any = None, dataloader_idx: int = 0) -> Any:
            """Move a batch; a training batch begins a step."""
            trainer = self.lightning_module.trainer
            if self._session is not None and trainer.training and trainer.state.fn == "fit":
                self._session.batch_fetched()
            return super().batch_to_device(batch, device, dataloader_idx)

        def pre_backward(self, closure_loss: Any) -> None:
            """Before the user's hooks and the backward pass."""
            if self._session is not None:
                self._session.before_backward()
            super().pre_backward(closure_loss)

        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            """Run the user's training step."""
            if self._session is not None:
                self._session.before_forward()
                self._sync_buffers()
            return super().training_step(*args, **kwargs)

        def validation_step(self, *args: Any, **kwargs: Any) -> Any:
            """Run the user's validation step."""
            if self._session is not None:
                self._session.heartbeat(Activity.VALIDATION)
                self._session.reach("validation", self._session.step)
                self._sync_buffers()
            return super().validation_step(*args, **kwargs)

        def _sync_buffers(self) -> None:
            """Rank 0's buffers for all, ahead of each forward pass, as with DistributedDataParallel."""
            if self.num_processes > 1:
                buffers = list(self.lightning_module.buffers())
                if buffers:
                    dist._broadcast_coalesced(dist.group.WORLD, buffers, 250 << 20, 0)  # type: ignore[attr-defined, arg-type]

        def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **kwargs: Any) -> Any:
            """Perform the optimizer step below the precision plugin."""
            output = super().optimizer_step(optimizer, closure, model, **kwargs)
            if self._session is not None:
                self._session.reach("batch_end", self._session.step - 1)
            return output

        def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
            """Write a checkpoint file, noted first so that a step entered again may overwrite it."""
            session = self._session
            if session is None:
                super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)
                return
            session.heartbeat(Activity.CHECKPOINT)
            step = session.step - 1
            session.reach("checkpoint_before", step)
            with session.journal.writing(os.fspath(filepath), lambda: session.reach("checkpoint_middle", step)):
                super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)
            session.reach("checkpoint_after", step)
            session.heartbeat(Activity.STEP)

        def remove_checkpoint(self, filepath: Any) -> None:
            """Remove a checkpoint file, noted first."""
            session = self._session
            if session is not None:
                session.journal.removing(os.fspath(filepath))
            super().remove_checkpoint(filepath)
            if session is not None:
                session.reach("checkpoint_removed", session.step - 1)

        def on_train_end(self) -> None:
            """Training is over."""
            if self._session is not None:
                self._session.heartbeat(Activity.ENDING)
                self._session.reach("train_end", self._session.step - 1)

        def teardown(self) -> None:
            """Leave the strategy as Lightning expects it."""
            if self.side is None:
                self._launcher.bring_hooks_back()
            super().teardown()

    LetoStrategy.__module__ = module_name
    LetoStrategy.__qualname__ = "LetoStrategy"
    return LetoStrategy
