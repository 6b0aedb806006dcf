"""Exactness of a chunk's update: state, undo copies, flags, bf16 copy and parity, bit by bit.

On a GPU the step is compared with torch's own, fused and foreach. Triton's interpreter rounds the product of a
multiply-add, so there it is compared with the same formula, rounded likewise, in torch.
"""

import torch
from torch import Tensor

from benchmarks.kernel_data import Place, table
from leto_strategy.triton_kernels.adam import AdamStep, Rounding
from leto_strategy.triton_kernels.chunk_pages import ChunkPages
from leto_strategy.triton_kernels.chunk_update import ChunkCode, num_tiles, update_chunk
from leto_strategy.triton_kernels.launch_shapes import FusedShape, Way
from leto_strategy.triton_kernels.pages import PageTable
from leto_strategy.triton_kernels.references import apply_matrix_torch
from leto_strategy.triton_kernels.tile_flags import TileFlags

Columns = tuple[Tensor, Tensor, Tensor]

STEPS = (
    AdamStep(1e-3, (0.9, 0.999), 1e-8, 0.01, 1),
    AdamStep(3e-4, (0.9, 0.95), 1e-8, 0.1, 7),
    AdamStep(1e-3, (0.9, 0.999), 1e-8, 0.0, 1000),
    AdamStep(1e-3, (0.9, 0.999), 1e-6, 0.01, 3, decoupled=False),
    AdamStep(1e-3, (0.9, 0.999), 1e-8, 0.01, 1, rounding=Rounding.FOREACH),
    AdamStep(3e-4, (0.4, 0.95), 1e-8, 0.1, 7, rounding=Rounding.FOREACH),
    AdamStep(1e-3, (0.9, 0.999), 1e-8, 0.0, 12345, rounding=Rounding.FOREACH),
    AdamStep(1e-3, (0.9, 0.999), 1e-6, 0.01, 3, decoupled=False, rounding=Rounding.FOREACH),
)


def torch_step(p: Tensor, m: Tensor, v: Tensor, grad: Tensor, step: AdamStep, clip: float) -> Columns:
    """The same step by torch's optimizer on a GPU."""
    param = torch.nn.Parameter(p.clone())
    kind = torch.optim.AdamW if step.decoupled else torch.optim.Adam
    fused = step.rounding is Rounding.FUSED
    optimizer = kind(
        [param], lr=step.lr, betas=step.betas, eps=step.eps, weight_decay=step.weight_decay, fused=fused,
        foreach=not fused,
    )  # fmt: skip
    number = torch.tensor(float(step.step - 1), device=p.device if fused else "cpu")
    optimizer.state[param] = {"step": number, "exp_avg": m.clone(), "exp_avg_sq": v.clone()}
    param.grad = (grad.float() * clip).to(grad.dtype).float()
    optimizer.step()
    state = optimizer.state[param]
    return param.detach(), state["exp_avg"], state["exp_avg_sq"]


def interpreted_step(
    p: Tensor, m: Tensor, v: Tensor, grad: Tensor, step: AdamStep, c: list[Tensor], clip: float
) -> Columns:  # fmt: skip
    """The kernels' formula, with the product of a multiply-add rounded, as the interpreter does."""
    g = (grad.float() * torch.tensor(clip)).to(grad.dtype).float()
    if step.rounding is Rounding.FOREACH:
        if step.weight_decay:
            p, g = (p * c[3], g) if step.decoupled else (p, p * c[3] + g)
        change = g - m
        m = c[0] * change + m if abs(c[0]) < 0.5 else -change * (1 - c[0]) + g
        v = c[2] * (g * g) + v * c[1]
        p = c[5] * (m / (_root(v) / c[6] + c[4])) + p
    else:
        if step.weight_decay:
            p, g = (-c[3] * p + p, g) if step.decoupled else (p, p * c[3] + g)
        m = c[0] * m + (-c[0] * g + g)
        square = g * g
        v = c[1] * v + (-c[1] * square + square)
        p = p - c[5] * m / (_root(v) / c[6] + c[4])
    return p, m, v


def _root(value: Tensor) -> Tensor:
    """The root rounded once: torch's own on the CPU is off by a bit here and there."""
    return value.double().sqrt().float()


class Chunk:
    """A chunk of `num` pages a column, its group's parity, and room for all that an update writes.

    Args:
        place: Where.
        num: Pages a column; the group has them in blocks of 16.
        dtype: Of gradients.
        rotate: Moments rotate.
        copy: With a bf16 working copy.
        height: Parity pages.
        scattered: Pages lie one by one, in no order.
    """

    def __init__(
        self, place: Place, num: int, *, dtype: torch.dtype = torch.float32, rotate: bool = True, copy: bool = False,
        height: int = 16, scattered: bool = False,
    ) -> None:  # fmt: skip
        self.place, self.num, self.rotate, self.copies, self.height = place, num, rotate, copy, height
        blocks, words = -(-num // 16), place.words
        self.old = _state(place, num)
        self.now = self.old.clone()
        self.grad = _gradients(place, num, dtype)
        self.undo, self.moved = place.poisoned(3, num), place.poisoned(2, num)
        self.copy = torch.full((num, words), 7.0, dtype=torch.bfloat16, device=place.device)
        order = torch.randperm(num).tolist() if scattered else list(range(num))

        def pages(rows: Tensor) -> PageTable:
            """Page i of the chunk is row order[i]."""
            found = table(rows)
            addresses = [found.addresses[row] for row in order]
            return PageTable.of_addresses(addresses, page_bytes=found.page_bytes, device=place.device, owner=rows)

        columns = [pages(self.now[i].view(torch.int32)) for i in range(3)]
        undo, moved = [pages(row) for row in self.undo], [pages(row) for row in self.moved]
        places: dict[str, PageTable] = (
            {"exp_avg_out": moved[0], "exp_avg_sq_out": moved[1]}
            if rotate
            else {"undo_exp_avg": undo[1], "undo_exp_avg_sq": undo[2]}
        )
        if copy:
            places["copy"] = pages(self.copy)
        self.pages = ChunkPages(columns[0], columns[1], columns[2], pages(self.grad), undo[0], **places)
        first = [[16 * (column * blocks + b) for b in range(blocks)] for column in range(3)]
        at = [column * blocks * 16 + i for column in range(3) for i in range(num)]
        matrix = place.matrix(3 * blocks * 16, height)[at].contiguous()
        self.code = ChunkCode((first[0], first[1], first[2])) if height == 16 else ChunkCode(matrix_PH=matrix)
        self.rows = torch.empty_like(matrix)
        self.rows[[column * num + row for column in range(3) for row in order]] = matrix
        self.parity, self.out = self._parity(self.old), place.poisoned(height)
        size = 3 * blocks * 16 * max(1, words // 32)
        self.flags = TileFlags(*(torch.zeros(size, dtype=torch.int64, device=place.device) for _ in range(2)))
        self.coefficients = torch.zeros(8, device=place.device)

    def _parity(self, columns: Tensor) -> Tensor:
        return apply_matrix_torch(columns.reshape(-1, self.place.words).view(torch.int32), self.rows)

    def update(self, step: AdamStep, clip: float, number: int, way: Way, shape: FusedShape | None = None) -> None:
        """Run the kernels."""
        step.write(self.coefficients)
        clips = torch.full((1,), clip, device=self.place.device)
        update_chunk(
            self.pages, self.code, table(self.parity), table(self.out), self.coefficients, clips, self.flags, number,
            step, way=way, shape=shape,
        )  # fmt: skip

    def result(self) -> Columns:
        """New parameters and moments."""
        moments = self.moved.view(torch.float32) if self.rotate else self.now[1:]
        return self.now[0], moments[0], moments[1]

    def expected(self, step: AdamStep, clip: float) -> Columns:
        """What they must be."""
        p, m, v = self.old.clone()
        if self.place.device.type == "cuda":
            return torch_step(p, m, v, self.grad, step, clip)
        return interpreted_step(p, m, v, self.grad, step, list(self.coefficients), clip)

    def verify(
        self, step: AdamStep, clip: float, number: int, way: Way, shape: FusedShape | None = None
    ) -> None:  # fmt: skip
        """Compare everything that was written, bit for bit."""
        for name, got, want in zip(
            ("param", "exp_avg", "exp_avg_sq"), self.result(), self.expected(step, clip), strict=True
        ):
            same = got.view(torch.int32) == want.view(torch.int32)
            if not bool(same.all()):
                worst = (got.view(torch.int32).long() - want.view(torch.int32).long()).abs().max().item()
                raise AssertionError(f"{name}: {int((~same).sum())} of {same.numel()} differ, by up to {worst} ulp")
        for i in range(1 if self.rotate else 3):
            assert torch.equal(self.undo[i], self.old[i].view(torch.int32)), f"undo {i}"
        if self.rotate:
            assert torch.equal(self.now[1:].view(torch.int32), self.old[1:].view(torch.int32)), "old moments"
        if self.copies:
            assert torch.equal(self.copy.view(torch.int16), self.now[0].bfloat16().view(torch.int16)), "bf16 copy"
        tiles = num_tiles(self.pages, way, shape)
        for flags in (self.flags.flags, self.flags.other_flags):
            assert bool((flags[:tiles] == number).all()), "flags of the chunk"
            assert not bool(flags[tiles:].any()), "flags beyond the chunk"
        assert torch.equal(self.out, self._parity(torch.stack(self.result()))), "parity"


def _state(place: Place, num: int) -> Tensor:
    """Parameters and moments as they are in training, with odd values among them: [3, num, words]."""
    shape = (num, place.words)
    p = torch.randn(shape, device=place.device) * 0.05
    m = torch.randn(shape, device=place.device) * 1e-3
    v = torch.rand(shape, device=place.device) ** 4 * 1e-4
    p[:, :3] = torch.tensor([0.0, -0.0, 1e-40], device=place.device)
    m[:, :3], v[:, :3] = 0.0, 0.0
    return torch.stack([p, m, v])


def _gradients(place: Place, num: int, dtype: torch.dtype) -> Tensor:
    """Gradients over many magnitudes."""
    shape = (num, place.words)
    g = torch.randn(shape, device=place.device) * torch.exp(torch.randn(shape, device=place.device) * 3)
    g[:, :3] = torch.tensor([0.0, 1e-30, -1e-40], device=place.device)
    return (g * 1e-2).to(dtype)


def check_update_chunk(
    place: Place, *, num: int, step: AdamStep, way: Way, clip: float = 1.0, shape: FusedShape | None = None,
    dtype: torch.dtype = torch.float32, rotate: bool = True, copy: bool = False, height: int = 16,
    scattered: bool = False,
) -> str:  # fmt: skip
    """One update of a chunk, everything compared."""
    chunk = Chunk(place, num, dtype=dtype, rotate=rotate, copy=copy, height=height, scattered=scattered)
    number = 2**40 + 3
    chunk.update(step, clip, number, way, shape)
    chunk.verify(step, clip, number, way, shape)
    return f"{num} pages a column, {height} parity pages, {step}"
