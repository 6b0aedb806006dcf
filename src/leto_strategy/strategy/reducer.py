"""Averages gradients over the ranks in an order that never changes.

Stock DistributedDataParallel rebuilds its buckets after the first iteration of a process, so with three or more ranks a
promoted trainer's first iteration would sum in another order. Here buckets, their order and their offsets come from the
state layout, which every generation plans alike, and the buckets are the retained gradient memory itself: what is
reduced is what survives.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from leto_strategy.errors import UnsupportedFeatureError


class GradientReducer:
    """Moves each finished gradient into retained memory and all-reduces full buckets while backward goes on.

    Per parameter this does what DistributedDataParallel does without `gradient_as_bucket_view`: the gradient of a
    backward pass is multiplied by 1/world into its bucket, buckets are summed over the ranks, `p.grad` is the view.

    Args:
        parameters: Parameters in layout order.
        views: Their gradient views in retained memory, same order.
        buckets: For each bucket the indices of its parameters.
        flat: For each bucket one flat tensor over its memory range.
        launch_order: Order in which buckets are all-reduced, the same on every rank.
        world: Number of ranks; with 1 nothing is reduced.
        find_unused: Whether parameters may take no part in a step. They are then skipped where no rank used them.
        on_first_gradient: Called when the first gradient of a backward pass has been computed.
        names: Names of the parameters, for errors.
    """

    def __init__(
        self,
        parameters: Sequence[Parameter],
        views: Sequence[Tensor],
        buckets: Sequence[Sequence[int]],
        flat: Sequence[Tensor],
        *,
        launch_order: Sequence[int],
        world: int,
        find_unused: bool,
        on_first_gradient: Callable[[], None],
        names: Sequence[str],
    ) -> None:
        self._parameters, self._views, self._names = list(parameters), list(views), list(names)
        self._buckets, self._flat, self._order = [list(b) for b in buckets], list(flat), list(launch_order)
        self._world, self._find_unused, self._on_first = world, find_unused, on_first_gradient
        self._bucket_of = {index: b for b, members in enumerate(self._buckets) for index in members}
        self._touched = bytearray(len(self._parameters))
        self._missing = [0] * len(self._buckets)
        self._next = 0
        self._works: list[Any] = []
        self._in_backward = False
        self._num_backwards = 0
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._hook(index))
            for index, parameter in enumerate(self._parameters)
        ]

    @property
    def touched(self) -> bytes:
        """One byte a parameter: 1 if the last backward pass gave it a gradient (on any rank)."""
        return bytes(self._touched)

    def restore(self, touched: bytes) -> None:
        """Take over what an earlier generation's backward pass left in retained memory."""
        self._touched[:] = touched
        self.attach()

    def begin_step(self) -> None:
        """A training step begins: no parameter has a gradient of it yet."""
        self._touched[:] = bytes(len(self._touched))
        self._num_backwards = 0

    def attach(self) -> None:
        """Let `p.grad` be the retained gradient of each parameter that has one."""
        for parameter, view, touched in zip(self._parameters, self._views, self._touched, strict=True):
            parameter.grad = view if touched else None

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def _hook(self, index: int) -> Callable[[Tensor], None]:
        view, bucket, scale = self._views[index], self._bucket_of.get(index), 1.0 / self._world

        def finished(parameter: Tensor) -> None:
            if not self._in_backward:
                self._begin()
            gradient = parameter.grad
            assert gradient is not None
            if gradient.is_sparse:
                raise ValueError(
                    f"Leto does not support sparse gradients yet; parameter {self._names[index]!r} has one."
                    " Use Embedding(sparse=False)."
                )
            with torch.no_grad():
                if self._world > 1:
                    torch.mul(gradient, scale, out=view)
                elif gradient is not view:
                    view.copy_(gradient)
            parameter.grad = view
            self._touched[index] = 1
            if bucket is None:
                return  # a parameter without elements is in no bucket
            self._missing[bucket] -= 1
            if self._world > 1:
                self._launch_ready()

        return finished

    def _begin(self) -> None:
        self._in_backward = True
        if self._num_backwards and self._world > 1:
            raise UnsupportedFeatureError(
                "Several backward passes in one training step can't be reduced in a fixed order by strategy='leto' yet;"
                " add the losses and run one."
            )
        self._num_backwards += 1
        self._missing = [len(members) for members in self._buckets]
        self._next, self._works = 0, []
        # The engine runs this when the whole backward pass is over, still inside `loss.backward()`.
        torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        self._on_first()

    def _launch_ready(self) -> None:
        while self._next < len(self._order) and self._missing[self._order[self._next]] == 0:
            self._works.append(dist.all_reduce(self._flat[self._order[self._next]], async_op=True))
            self._next += 1

    def _finish(self) -> None:
        self._in_backward = False
        if not all(self._touched):
            self._fill_unused()
        if self._world > 1:
            while self._next < len(self._order):
                self._works.append(dist.all_reduce(self._flat[self._order[self._next]], async_op=True))
                self._next += 1
            for work in self._works:
                work.wait()
            self._works = []
            if self._find_unused:
                used = torch.frombuffer(self._touched, dtype=torch.uint8)
                dist.all_reduce(used, op=dist.ReduceOp.MAX)
                self.attach()

    def _fill_unused(self) -> None:
        unused = [name for name, touched in zip(self._names, self._touched, strict=True) if not touched]
        if self._world > 1 and not self._find_unused:
            raise RuntimeError(
                f"Parameters took no part in the loss of this step: {', '.join(unused[:5])}"
                f"{' and more' if len(unused) > 5 else ''}. With several ranks say so:"
                " LetoStrategy(find_unused_parameters=True)."
            )
        with torch.no_grad():
            for view, touched in zip(self._views, self._touched, strict=True):
                if not touched:
                    view.zero_()
