"""Builds `LetoStrategy` for one of Lightning's two distributions.

The class only says where in Lightning's life cycle things happen; what happens is in `session` (a trainer's fit),
`launcher` (processes) and the modules below them. It subclasses `DDPStrategy`, because Lightning injects samplers by
that, but wraps nothing in DistributedDataParallel.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

from leto_strategy.config import LetoConfig, set_rank_variables, trainer_identity
from leto_strategy.errors import UnsupportedFeatureError
from leto_strategy.progress import Activity
from leto_strategy.recovery.decision import Mode
from leto_strategy.strategy.capture.loggers import LoggerState
from leto_strategy.strategy.capture.snapshot import FitSnapshot
from leto_strategy.strategy.data.fit import FitData
from leto_strategy.strategy.flavour import Flavour
from leto_strategy.strategy.launch import resume
from leto_strategy.strategy.launch.checks import check_interactive
from leto_strategy.strategy.launch.launcher import build_launcher
from leto_strategy.strategy.launch.trainer import TrainerSide, hush, print_no_summary
from leto_strategy.strategy.scaling import finish_scaling
from leto_strategy.strategy.session import FitSession
from leto_strategy.strategy.signature import DDP_LATER, DDP_NO_EFFECT, DDP_OPTIONS, declare_options


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
            **options: Options of `leto_strategy.config.LetoConfig`; the signature and `LetoStrategy.__doc__` list them.

        Raises:
            ConfigurationError: An unknown option or a value that can't be.
        """

        strategy_name = "leto"

        def __init__(self, **options: Any) -> None:
            LetoConfig.reject_unknown(set(options), also=DDP_OPTIONS | DDP_LATER | DDP_NO_EFFECT)
            for name in DDP_LATER & set(options):
                if options.pop(name) not in (None, False, "popen"):
                    raise UnsupportedFeatureError(f"LetoStrategy({name}=...) is not supported yet; leave it out.")
            for name in DDP_NO_EFFECT:
                options.pop(name, None)
            names = set(LetoConfig.option_names())
            values = {name: options.pop(name) for name in list(options) if name in names}
            if "faults" in values:
                values["faults"] = tuple(dict(fault) for fault in values["faults"])
            self.leto = LetoConfig(**values)
            super().__init__(**options)
            self.recoveries: list[dict[str, Any]] = []
            self.syncs_buffers = True
            self.side: TrainerSide | None = None
            self._session: FitSession | None = None
            self._data: FitData | None = None
            self._remembered: dict[str, Any] = {}
            self._logger_state: LoggerState | None = None

        def __getstate__(self) -> dict[str, Any]:
            state = self.__dict__.copy()
            for name in ("_launcher", "side", "_session", "_data", "_logger_state"):
                state[name] = None
            return state

        @classmethod
        def register_strategies(cls, strategy_registry: Any) -> None:
            """Nothing to do: the name is registered when Lightning is imported."""

        def set_world_ranks(self) -> None:
            """As in DDPStrategy, also where the script has made its environment anew."""
            identity = trainer_identity()
            if identity is not None:
                set_rank_variables(identity)
            super().set_world_ranks()

        def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
            """Load a checkpoint; the one that the call names as it was when the call began."""
            checkpoint: dict[str, Any] = super().load_checkpoint(resume.pinned(checkpoint_path), weights_only)
            return checkpoint

        def load_optimizer_state_dict(self, checkpoint: Any) -> None:
            """Load the optimizer's state, which `on_train_start` brings to retained memory."""
            super().load_optimizer_state_dict(checkpoint)
            if self._session is not None:
                self._session.updater.check_loaded()

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
            named = dict(self.lightning_module.named_parameters())
            for optimizer, groups, state in zip(
                self._optimizers, remembered["groups"], remembered["optimizers"], strict=True
            ):
                for names in groups[len(optimizer.param_groups) :]:  # joined while training ran
                    optimizer.add_param_group({"params": [named[name] for name in names]})
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
            self.side.note_user_state(self.lightning_module.trainer)
            self.side.join(self._process_group_backend, self._timeout)

        def setup(self, trainer: Any) -> None:
            """Prepare everything, wait to be promoted, and take over."""
            assert self.side is not None
            if trainer.state.fn != "fit":
                self.side.wait_for_promotion()
                self.side.begin_to_log(trainer)
                super().setup(trainer)
                return
            self.accelerator.setup(trainer)
            self.model: Any = self.precision_plugin.convert_module(self.lightning_module)
            self.model_to_device()
            self._remembered = {}  # a second fit begins with new optimizers
            self.syncs_buffers = True
            data = self._data = FitData(trainer, flavour)  # first: configure_optimizers may ask for the loaders
            self.setup_optimizers(trainer)
            session = FitSession(self.side.identity, self.leto, trainer, self._optimizers)
            self.setup_precision_plugin()
            loggers = self.side.loggers
            assert loggers is not None
            session.snapshot = FitSnapshot(trainer, flavour, loggers, data.generators)
            session.data = data
            self._session = session
            self._connect_ranks()
            order = self.side.wait_for_promotion(session.prepare, session.rehearse(flavour))
            session.promoted(order["mode"], order["step"], self.side.entered)
            if order["mode"] == Mode.FRESH:
                self._say_updater(session)
                self.side.begin_to_log(trainer)
                self._sync_module_states()
            else:
                self._enter_in_the_middle(trainer, session)
            data.intercept(session.before_batch)
            self._intercept(trainer, session)

        def _say_updater(self, session: FitSession) -> None:
            if session.why_snapshots is not None:
                flavour.pytorch("utilities.rank_zero").rank_zero_info(
                    f"Leto copies the whole training state after every step (updater='sync_snapshot'):"
                    f" {session.why_snapshots.rstrip('.')}."
                )
            if session.updater.protected is not None:
                flavour.pytorch("utilities.rank_zero").rank_zero_info(
                    f"Leto protects, on each rank like this one, {session.updater.protected}."
                )

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
            print_no_summary(trainer, flavour)

            def enter() -> None:
                session.enter_resumed_step()
                bar = trainer.progress_bar_callback
                if bar is not None:
                    bar.on_train_epoch_start(trainer, trainer.lightning_module)

            assert session.snapshot is not None
            assert self._data is not None
            entry = session.entry_record()
            self._data.reopen(entry["data"], lambda: session.heartbeat(Activity.STARTING))
            session.snapshot.position.enter_epoch(entry["snapshot"]["position"], enter)

        def _intercept(self, trainer: Any, session: FitSession) -> None:
            optimization = trainer.fit_loop.epoch_loop.automatic_optimization
            make_closure: Callable[..., Any] = optimization._make_closure
            self._result_class = flavour.pytorch("loops.optimization.automatic").ClosureResult

            def remember_closure(*args: Any, **kwargs: Any) -> Any:
                self._closure = make_closure(*args, **kwargs)
                session.quieten(self._closure, self._result_class)
                return self._closure

            optimization._make_closure = remember_closure
            if session.updater.steps_itself:
                self._replace_step(self._optimizers[0], session)
            end_epoch: Callable[[], None] = trainer.fit_loop.on_advance_end

            def on_advance_end() -> None:
                session.reach("epoch_end", session.step)
                end_epoch()

            trainer.fit_loop.on_advance_end = on_advance_end
            end_run: Callable[[], None] = trainer.fit_loop.on_run_end

            def on_run_end() -> None:
                session.updater.leave()
                end_run()

            trainer.fit_loop.on_run_end = on_run_end
            checkpoint_class = flavour.pytorch("callbacks").ModelCheckpoint
            for callback in trainer.callbacks:
                if isinstance(callback, checkpoint_class):
                    session.journal.watch(callback)

        def _replace_step(self, optimizer: Any, session: FitSession) -> None:
            """Let Lightning, its precision plugin and the user call the transaction in place of torch's step."""

            def step(closure: Callable[[], Any] | None = None) -> Any:
                optimizer._opt_called = True
                if session.finishing:
                    return self._finish_step(session, optimizer)
                loss = None if closure is None else closure()
                scaler = getattr(self.precision_plugin, "scaler", None)
                self._end_step(session, scaled=scaler is not None and closure is None)
                return loss

            step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # schedulers ask whether they came first
            optimizer.step = step

        def on_train_start(self) -> None:
            """After the start hooks: parameters become retained memory."""
            if self._session is not None:
                self._session.attach()

        def process_dataloader(self, dataloader: Any) -> Any:
            """Make a loader of a fit resumable, and reopen it where a record says."""
            return dataloader if self._data is None else self._data.adopt(dataloader)

        # With one rank there is nobody to wait for, and no reason to wait for a GPU.

        def barrier(self, *args: Any, **kwargs: Any) -> None:
            """Wait for the other ranks."""
            if self.num_processes > 1:
                super().barrier(*args, **kwargs)

        def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
            """Combine the ranks' tensors."""
            return super().reduce(tensor, *args, **kwargs) if self.num_processes > 1 else tensor

        def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
            """Combine the ranks' decisions."""
            if self.num_processes > 1:
                decision = super().reduce_boolean_decision(decision, all)
            return decision

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
                self._session.updater.before_backward()
            super().pre_backward(closure_loss)

        @contextmanager
        def block_backward_sync(self) -> Iterator[None]:
            """Only accumulate gradients in backward passes inside this context."""
            if self._session is None:
                yield
                return
            reducer = self._session.updater.reducer
            reducer.synchronises = False
            try:
                yield
            finally:
                reducer.synchronises = True

        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            """Run the user's training step; with manual optimisation it is the whole step."""
            session = self._session
            if session is None:
                return super().training_step(*args, **kwargs)
            manual = not self.lightning_module.automatic_optimization
            if manual and session.finishing:
                output = session.recall()["output"]
            else:
                session.before_forward()
                self._sync_buffers()
                with session.rehearsal.noting(session.step) if manual else nullcontext():
                    output = super().training_step(*args, **kwargs)
                self.syncs_buffers = not manual and session.updater.reducer.synchronises
                if manual:
                    session.end_step(loss=None, output=output)
            if manual:
                session.reach("batch_end", session.step - 1)
            return output

        def validation_step(self, *args: Any, **kwargs: Any) -> Any:
            """Run the user's validation step."""
            if self._session is not None:
                self._session.heartbeat(Activity.VALIDATION)
                self._session.reach("validation", self._session.step)
                self._sync_buffers()
                self.syncs_buffers = False
            return super().validation_step(*args, **kwargs)

        def _sync_buffers(self) -> None:
            """Rank 0's buffers for all ahead of a forward pass, where DistributedDataParallel would.

            It leaves them alone after a pass without gradients or their reduction.
            """
            if self.num_processes > 1 and self.syncs_buffers:
                buffers = list(self.lightning_module.buffers())
                if buffers:
                    dist._broadcast_coalesced(dist.group.WORLD, buffers, 250 << 20, 0)  # type: ignore[attr-defined, arg-type]

        def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **kwargs: Any) -> Any:
            """Attempt to update; with automatic optimisation this ends the step, whatever comes of it."""
            session = self._session
            if session is None or not self.lightning_module.automatic_optimization:
                return super().optimizer_step(optimizer, closure, model, **kwargs)
            if session.finishing:
                output = self._finish_step(session, optimizer)
            else:
                with session.rehearsal.noting(session.step):
                    output = super().optimizer_step(optimizer, closure, model, **kwargs)
                if not session.updater.steps_itself:
                    self._end_step(session)
                elif not session.attempted:  # the gradients overflowed
                    self._end_step(session, skipped=True)
            session.reach("batch_end", session.step - 1)
            return output

        def _end_step(self, session: FitSession, *, skipped: bool = False, scaled: bool = False) -> None:
            result = self._closure._result
            loss, extra = (None, {}) if result is None else (result.loss, result.extra)
            session.end_step(loss=loss, output=extra, skipped=skipped, scaled=scaled)

        def _finish_step(self, session: FitSession, optimizer: Any) -> Any:
            """Finish the step of a dead generation: nothing but the rest of the update runs."""
            mid = session.recall()
            self._closure._result = self._result_class(mid["loss"], extra=mid["output"])
            if mid["scaled"]:
                finish_scaling(self.precision_plugin.scaler, optimizer)
            return self._closure._result.loss

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
            if self.side is not None:
                super().teardown()
                return
            self._launcher.bring_hooks_back()
            # Lightning moves optimizers to the CPU here; making them for that could hide the error that ends the call.
            remembered, self._remembered = self._remembered, {}
            super().teardown()
            self._remembered = remembered

    declare_options(LetoStrategy, ddp)
    LetoStrategy.__module__ = module_name
    LetoStrategy.__qualname__ = "LetoStrategy"
    return LetoStrategy
