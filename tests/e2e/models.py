"""Variants of the model of `tiny.py`: ways of training that users have. Each is a subclass of its module class."""

from collections.abc import Callable
from typing import Any

import torch

Variant = Callable[[Any, Any, Any], type]
VARIANTS: dict[str, Variant] = {}


def _register(make: Variant) -> Variant:
    VARIANTS[make.__name__] = make
    return make


def variant(case: Any, pl: Any, base: type) -> type:
    """The module class of a case."""
    return base if case.model == "tiny" else VARIANTS[case.model](base, case, pl)


@_register
def none_loss(base: Any, case: Any, pl: Any) -> type:
    """`training_step` returns None for some batches."""

    class NoneLoss(base):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            output = super().training_step(batch, batch_idx)
            return None if batch_idx in (1, 4) else output

    return NoneLoss


@_register
def ends_epoch_early(base: Any, case: Any, pl: Any) -> type:
    """`on_train_batch_start` returns -1: the batch is dropped and the epoch ends."""

    class EndsEarly(base):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
            return -1 if batch_idx == 4 and self.current_epoch == 0 else None

    return EndsEarly


@_register
def steps_every_second_batch(base: Any, case: Any, pl: Any) -> type:
    """The user's own accumulation: `optimizer_step` and `optimizer_zero_grad` act on every second batch."""

    class EverySecond(base):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
            if batch_idx % 2:
                optimizer.step(closure=optimizer_closure)
            else:
                optimizer_closure()

        def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
            if batch_idx % 2 == 0:
                optimizer.zero_grad()

    return EverySecond


@_register
def many_hooks(base: Any, case: Any, pl: Any) -> type:
    """Hooks that change gradients, clipping, schedulers and batches, some of them with random numbers."""

    class Hooks(base):
        def on_after_backward(self) -> None:
            for p in self.parameters():
                if p.grad is not None:
                    p.grad.add_(0.01 * torch.randn(p.shape, generator=self.noise(), device=self.device))

        def noise(self) -> torch.Generator:
            return torch.Generator(self.device).manual_seed(self.global_step)

        def configure_gradient_clipping(self, optimizer: Any, **kwargs: Any) -> None:
            self.clip_gradients(optimizer, gradient_clip_val=0.3, gradient_clip_algorithm="value")

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.head.weight.grad = self.head.weight.grad * 0.5
            self.log("norm", self.head.weight.grad.norm())

        def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
            if self.global_step % 2:
                super().lr_scheduler_step(scheduler, metric)

        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return batch[0] + 0.05 * torch.randn(()), batch[1]

        def on_validation_epoch_end(self) -> None:
            self.scale = getattr(self, "scale", 1.0) * 0.9

        def on_train_epoch_start(self) -> None:
            self.net[3].train(self.current_epoch != 1)

    return Hooks


@_register
def unused_parameters(base: Any, case: Any, pl: Any) -> type:
    """One layer takes part in every second batch only."""

    class Unused(base):
        def __init__(self) -> None:
            super().__init__()
            self.sometimes = torch.nn.Linear(8, 1)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            output = super().training_step(batch, batch_idx)
            if (batch_idx + self.global_rank) % 3 == 0:
                output["loss"] = output["loss"] + (self.sometimes(batch[0]) ** 2).mean()
            return output

    return Unused


def _manual(base: Any) -> Any:
    """The base class with manual optimisation."""

    class Manual(base):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

    return Manual


@_register
def manual_two_optimizers(base: Any, case: Any, pl: Any) -> type:
    """As a GAN is trained: two optimizers, each with a backward pass and a step in every batch."""

    class Manual(_manual(base)):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            first, second = self.optimizers()
            self.toggle_optimizer(first)
            output = super().training_step(batch, batch_idx)
            first.zero_grad()
            self.manual_backward(output["loss"])
            self.clip_gradients(first, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            first.step()
            self.untoggle_optimizer(first)
            self.toggle_optimizer(second)
            loss = (self.head(self.net(batch[0])) - 1).abs().mean()
            second.zero_grad()
            self.manual_backward(loss)
            if batch_idx % 2 == 0:
                second.step()
            self.untoggle_optimizer(second)
            if batch_idx % 3 == 0:
                self.lr_schedulers().step()
            return output

        def configure_optimizers(self) -> Any:
            one = torch.optim.RMSprop(self.net.parameters(), 1e-2, momentum=0.5)
            two = torch.optim.AdamW(self.head.parameters(), 1e-2)
            return [one, two], [torch.optim.lr_scheduler.StepLR(one, 1, 0.9)]

    return Manual


@_register
def manual_accumulation(base: Any, case: Any, pl: Any) -> type:
    """Manual optimisation with gradients that are carried from batch to batch."""

    class Manual(_manual(base)):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            optimizer = self.optimizers()
            output = super().training_step(batch, batch_idx)
            self.manual_backward(output["loss"] / 3)
            if batch_idx % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()
            return output

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 1e-2, momentum=0.9)

    return Manual


@_register
def manual_gradient_surgery(base: Any, case: Any, pl: Any) -> type:
    """Gradients of two losses are kept as they are, then mixed."""

    class Surgery(_manual(base)):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            optimizer = self.optimizers()
            output = super().training_step(batch, batch_idx)
            optimizer.zero_grad()
            self.manual_backward(output["loss"])
            first = [p.grad for p in self.head.parameters()]
            optimizer.zero_grad()
            self.manual_backward((self.head(self.net(batch[0])) - 1).abs().mean())
            for p, gradient in zip(self.head.parameters(), first, strict=True):
                p.grad = 0.7 * gradient + 0.3 * p.grad
            optimizer.step()
            return output

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], 1e-2)

    return Surgery


def _with_optimizer(name: str, make: Callable[[Any], Any]) -> None:
    def build(base: Any, case: Any, pl: Any) -> type:
        class Other(base):
            def configure_optimizers(self) -> Any:
                optimizer = make([p for p in self.parameters() if p.requires_grad])
                scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=40, cycle_momentum=False)
                return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

        return Other

    build.__doc__ = f"torch.optim.{name}."
    VARIANTS[name] = build


class _HalvingSGD(torch.optim.SGD):
    """An optimizer of the user's own: a subclass whose step does more."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["seen"] = self.state[parameter].get("seen", 0) + 1
                parameter.data.mul_(0.999)
        return loss


class _CountingSGD(torch.optim.SGD):
    """An optimizer of the user's own that keeps a number, and last gradients, beside its state."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, 1e-2, momentum=0.9)
        self.num_steps = 0

    def step(self, closure: Any = None) -> Any:
        self.num_steps += 1
        loss = closure()
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                state = self.state[parameter]
                if "last" in state:
                    parameter.add_(state["last"], alpha=-1e-3 / self.num_steps)
                state["last"] = parameter.grad  # itself, not a copy
        super().step()
        return loss


class _Lookahead(torch.optim.Optimizer):
    """Wraps another optimizer and keeps slow weights."""

    def __init__(self, parameters: Any) -> None:
        self.base = torch.optim.AdamW(parameters, 1e-2)
        super().__init__(self.base.param_groups, {})
        self.param_groups = self.base.param_groups
        self.slow = [p.detach().clone() for p in self.param_groups[0]["params"]]
        self.num_steps = 0

    def step(self, closure: Any = None) -> Any:
        loss = self.base.step(closure)
        self.num_steps += 1
        if self.num_steps % 3 == 0:
            for parameter, slow in zip(self.param_groups[0]["params"], self.slow, strict=True):
                slow.add_(parameter.data - slow, alpha=0.5)
                parameter.data.copy_(slow)
        return loss


def _hooked(parameters: Any) -> Any:
    optimizer = torch.optim.AdamW(parameters, 1e-2)
    optimizer.register_step_post_hook(lambda o, args, kwargs: o.param_groups[0]["params"][0].data.mul_(0.99))
    return optimizer


_with_optimizer("RMSprop", lambda p: torch.optim.RMSprop(p, 1e-3))
_with_optimizer("Adagrad", lambda p: torch.optim.Adagrad(p, 1e-2))
_with_optimizer("NAdam", lambda p: torch.optim.NAdam(p, 1e-3))
_with_optimizer("Rprop", lambda p: torch.optim.Rprop(p, 1e-3))
_with_optimizer("LBFGS", lambda p: torch.optim.LBFGS(p, 1e-2, max_iter=3, history_size=4))
_with_optimizer("own_subclass", lambda p: _HalvingSGD(p, 1e-2, momentum=0.9))
_with_optimizer("step_hooks", _hooked)
_with_optimizer("counting", _CountingSGD)
_with_optimizer("lookahead", _Lookahead)
_with_optimizer("fused", lambda p: torch.optim.AdamW(p, 1e-2, fused=True))


@_register
def clips_weights(base: Any, case: Any, pl: Any) -> type:
    """A hook writes parameters after the optimizer step."""

    class Clips(base):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            super().on_train_batch_end(outputs, batch, batch_idx)
            for p in self.head.parameters():
                p.data.clamp_(-0.2, 0.2)

    return Clips


@_register
def writes_at_the_end(base: Any, case: Any, pl: Any) -> type:
    """Training is over, and a hook changes the weights in place, as when adapters are merged."""

    class Merged(base):
        def on_train_end(self) -> None:
            with torch.no_grad():
                self.head.weight.mul_(0.5)

    return Merged


@_register
def writes_moments(base: Any, case: Any, pl: Any) -> type:
    """A hook writes the optimizer's state in place."""

    class Halves(base):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            for state in self.trainer.optimizers[0].state.values():
                state["exp_avg"].mul_(0.5)

    return Halves


@_register
def thaws_in_a_step(base: Any, case: Any, pl: Any) -> type:
    """A group joins the optimizer between two batches."""

    class Thaws(base):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if self.global_step == 3:
                self.optimizers().add_param_group({"params": list(self.net.parameters()), "lr": 1e-3})

        def configure_optimizers(self) -> Any:
            return torch.optim.RMSprop(self.head.parameters(), 1e-2, momentum=0.9)

    return Thaws


@_register
def fails_in_setup(base: Any, case: Any, pl: Any) -> type:
    """A bug ahead of `configure_optimizers`."""

    class Fails(base):
        def setup(self, stage: str) -> None:
            raise ZeroDivisionError("a bug of the user")

    return Fails


@_register
def finetuning(base: Any, case: Any, pl: Any) -> type:
    """A frozen backbone that thaws in the second epoch and joins the optimizer as a new group."""

    class Finetuned(base):
        @property
        def backbone(self) -> Any:
            return self.net

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.head.parameters(), 1e-2)

    return Finetuned


@_register
def rnn_state(base: Any, case: Any, pl: Any) -> type:
    """A hidden state that is carried from batch to batch in an attribute and a buffer, and drawn dropout."""

    class Recurrent(base):
        def __init__(self) -> None:
            super().__init__()
            self.cell = torch.nn.GRUCell(8, 8)
            self.register_buffer("hidden", torch.zeros(1, 8), persistent=False)
            self.history: list[torch.Tensor] = []

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            hidden = self.cell(batch[0], self.hidden.repeat(len(batch[0]), 1))
            self.hidden.copy_(hidden.mean(0, keepdim=True).detach())
            self.history = [*self.history[-2:], hidden.detach().mean()]
            output = super().training_step((batch[0] + hidden, batch[1]), batch_idx)
            self.log("history", torch.stack(self.history).mean())
            return output

    return Recurrent


def _scaler(pl: Any, device: str) -> Any:
    scaler = torch.amp.GradScaler(device, init_scale=2.0**19, growth_interval=2)
    return pl.plugins.MixedPrecision("16-mixed", device, scaler)


def _foreign_precision(pl: Any, device: str) -> Any:
    return type("TransformerEnginePrecision", (pl.plugins.Precision,), {})()


PLUGINS: dict[str, Callable[[Any, str], Any]] = {"scaler": _scaler, "foreign_precision": _foreign_precision}


def callbacks_of(case: Any, pl: Any) -> list[Any]:
    """Callbacks that the names in a case ask for and this module knows."""
    known = {
        "accumulation_scheduler": lambda: pl.callbacks.GradientAccumulationScheduler({0: 1, 1: 3}),
        "finetuning": lambda: pl.callbacks.BackboneFinetuning(unfreeze_backbone_at_epoch=1, verbose=False),
        "averaging": lambda: pl.callbacks.WeightAveraging(),
        "swa": lambda: pl.callbacks.StochasticWeightAveraging(1e-2),
        "pruning": lambda: pl.callbacks.ModelPruning("l1_unstructured"),
        "lr_finder": lambda: pl.callbacks.LearningRateFinder(),
        "ema": lambda: pl.callbacks.EMAWeightAveraging(decay=0.9),
    }
    return [known[name]() for name in case.callbacks if name in known]
