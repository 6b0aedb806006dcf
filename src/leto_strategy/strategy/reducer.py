"""Averages gradients over the ranks in an order that never changes.

Stock DistributedDataParallel rebuilds its buckets after the first iteration of a process, so with three or more ranks a
promoted trainer's first iteration would sum in another order. Here buckets, their order and their offsets come from the
state layout, which every generation plans alike, and the buckets are the retained gradient memory itself: what is
reduced is what survives.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter


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
        hands_out_views: `p.grad` is the view, as with DDP's `gradient_as_bucket_view`; else it stays autograd's own
            tensor, as with DDP by default, and the views are only what is reduced.
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
        hands_out_views: bool = True,
    ) -> None:
        self._hands_out_views = hands_out_views
        self._parameters, self._views, self._names = list(parameters), list(views), list(names)
        self._buckets, self._flat, self._order = [list(b) for b in buckets], list(flat), list(launch_order)
        self._world, self._find_unused, self._on_first = world, find_unused, on_first_gradient
        self._bucket_of = {index: b for b, members in enumerate(self._buckets) for index in members}
        self._touched = bytearray(len(self._parameters))
        self._used = bytearray(len(self._parameters))  # since the last reduction
        self._in_pass = bytearray(len(self._parameters))
        self._missing = [0] * len(self._buckets)
        self._next = 0
        self._works: list[Any] = []
        self._in_backward = False
        self.synchronises = True
        """Whether a backward pass ends with a reduction; else gradients are only accumulated."""
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._hook(index))
            for index, parameter in enumerate(self._parameters)
        ]

    def restore(self, touched: bytes) -> None:
        """Take over what an earlier generation's backward pass left in retained memory."""
        self._touched[:] = touched
        self.attach()

    def adopt(self, gradients: Mapping[int, Tensor]) -> None:
        """Take over these gradients, by the indices of their parameters; the others have none."""
        assert not self._hands_out_views
        for index, parameter in enumerate(self._parameters):
            parameter.grad = gradients.get(index)

    def begin_step(self) -> None:
        """A step begins: no parameter has a gradient of it yet."""
        self._touched[:] = bytes(len(self._touched))
        self._used[:] = bytes(len(self._used))

    def attach(self) -> None:
        """Let `p.grad` be the kept gradient of each parameter that has one."""
        for parameter, view, touched in zip(self._parameters, self._views, self._touched, strict=True):
            parameter.grad = view if touched else None

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    @property
    def _reduces(self) -> bool:
        return self._world > 1 and self.synchronises

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
                if self._reduces:
                    torch.mul(gradient, scale, out=view)
                elif self._hands_out_views and gradient is not view:
                    view.copy_(gradient)
            if self._hands_out_views:
                parameter.grad = view
            self._touched[index] = self._used[index] = self._in_pass[index] = 1
            if bucket is None:
                return  # a parameter without elements is in no bucket
            self._missing[bucket] -= 1
            if self._reduces:
                self._launch_ready()

        return finished

    def _begin(self) -> None:
        self._in_backward = True
        self._in_pass[:] = bytes(len(self._in_pass))
        self._missing = [len(members) for members in self._buckets]
        self._next, self._works = 0, []
        # The engine runs this when the whole backward pass is over, still inside `loss.backward()`.
        torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        self._on_first()

    def _launch_ready(self) -> None:
        while self._next < len(self._order) and self._missing[self._order[self._next]] == 0:
            self._launch()

    def _launch(self) -> None:
        self._works.append(dist.all_reduce(self._flat[self._order[self._next]], async_op=True))
        self._next += 1

    def _finish(self) -> None:
        self._in_backward = False
        if not self._reduces:
            return
        kept = {} if all(self._in_pass) else self._fill_unused()
        while self._next < len(self._order):
            self._launch()
        for work in self._works:
            work.wait()
        self._works = []
        if self._find_unused:
            used = torch.frombuffer(self._used, dtype=torch.uint8).to(self._views[0].device)
            dist.all_reduce(used, op=dist.ReduceOp.MAX)
            self._used[:] = bytes(used.tolist())
            with torch.no_grad():
                for index, gradient in kept.items():
                    if not self._used[index]:
                        self._views[index].copy_(gradient)  # nobody has used it: its gradient stays what it was
            had = [parameter.grad is not None for parameter in self._parameters]
            self._touched[:] = bytes(map(max, had, self._used))
            if self._hands_out_views:
                self.attach()
        if not self._hands_out_views:
            self._copy_out()
        self._used[:] = bytes(len(self._used))

    def _copy_out(self) -> None:
        with torch.no_grad():
            for index, (parameter, view) in enumerate(zip(self._parameters, self._views, strict=True)):
                if parameter.grad is not None:
                    parameter.grad.copy_(view)
                elif self._used[index]:  # other ranks have used it
                    parameter.grad = view.clone()

    def _fill_unused(self) -> dict[int, Tensor]:
        """Let parameters without a gradient in this pass take part in the reduction; returns what they had before."""
        unused = [index for index, present in enumerate(self._in_pass) if not present]
        if not self._find_unused:
            names = [self._names[index] for index in unused]
            raise RuntimeError(
                f"Parameters took no part in the loss of this step: {', '.join(names[:5])}"
                f"{' and more' if len(names) > 5 else ''}. With several ranks say so:"
                " LetoStrategy(find_unused_parameters=True)."
            )
        kept: dict[int, Tensor] = {}
        with torch.no_grad():
            for index in unused:
                view, gradient = self._views[index], self._parameters[index].grad
                if gradient is None:
                    view.zero_()
                else:
                    kept[index] = gradient.clone()
                    torch.mul(gradient, 1.0 / self._world, out=view)
        return kept
