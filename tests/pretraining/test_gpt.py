"""The network: shapes, causality, rotary positions, routing of tokens to experts, and the same bits each time."""

import pytest
import torch
from torch import Tensor

from leto_strategy.pretraining.gpt import GPT, MixtureOfExperts, balance_loss, rotate

VOCABULARY, CONTEXT, WIDTH = 50, 16, 24


def network(**options: object) -> GPT:
    torch.manual_seed(5)
    arguments = {"vocabulary": VOCABULARY, "context": CONTEXT, "width": WIDTH, "layers": 2, "heads": 4, **options}
    return GPT(**arguments)  # type: ignore[arg-type]


def random_tokens(batch: int = 3, length: int = CONTEXT) -> Tensor:
    return torch.randint(VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(6))


KINDS = pytest.mark.parametrize(
    "options",
    [{"positions": "rope", "heads": 3}, {"positions": "learned", "tie_weights": False}, {"experts": 4}],
    ids=["rope", "learned", "experts"],
)


@KINDS
@pytest.mark.parametrize("length", [1, CONTEXT])
def test_logits_have_a_row_for_each_token(options: dict[str, object], length: int) -> None:
    logits, balance = network(**options)(random_tokens(length=length))
    assert logits.shape == (3, length, VOCABULARY)
    assert balance.shape == ()
    assert bool(balance > 0) == ("experts" in options)


@KINDS
def test_a_later_token_never_changes_an_earlier_logit(options: dict[str, object]) -> None:
    """With experts, how many rows an expert's product has changes its last bit; nothing else may."""
    model = network(**options).double()
    tokens = random_tokens()
    expected = model(tokens).logits
    for place in range(1, CONTEXT):
        changed = tokens.clone()
        changed[:, place:] = (changed[:, place:] + 7) % VOCABULARY
        logits = model(changed).logits
        assert not torch.equal(logits[:, place], expected[:, place])
        if "experts" in options:
            torch.testing.assert_close(logits[:, :place], expected[:, :place], rtol=0, atol=1e-12)
        else:
            assert torch.equal(logits[:, :place], expected[:, :place])


@KINDS
def test_a_step_gives_the_same_bits_again(options: dict[str, object]) -> None:
    results = []
    for _ in range(2):
        model = network(**options)
        logits, balance = model(random_tokens())
        (logits.square().mean() + balance).backward()
        results.append([logits, *(parameter.grad for parameter in model.parameters())])
    assert all(torch.equal(first, second) for first, second in zip(*results, strict=True))


def test_tied_weights_are_one_parameter() -> None:
    tied, untied = network(), network(tie_weights=False)
    assert tied.head.weight is tied.embedding.weight
    sizes = [sum(parameter.numel() for parameter in model.parameters()) for model in (tied, untied)]
    assert sizes[1] - sizes[0] == VOCABULARY * WIDTH


def test_rotary_scores_depend_on_distance_only() -> None:
    query, key = torch.randn(2, 1, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    scores = rotate(query.expand(12, 8)) @ rotate(key.expand(12, 8)).T
    for distance in range(-11, 12):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[0].expand_as(diagonal), rtol=1e-5, atol=1e-5)
    assert scores[0].unique().numel() == 12


def test_each_token_gets_the_weighted_answers_of_its_best_experts() -> None:
    torch.manual_seed(2)
    mixture = MixtureOfExperts(6, 12, 5, 2).double()
    x = torch.randn(3, 7, 6, dtype=torch.float64)
    mixed, _ = mixture(x)
    expected = torch.empty_like(x)
    for place in ((b, c) for b in range(3) for c in range(7)):
        probabilities = mixture.router(x[place]).softmax(dim=-1)
        best = probabilities.argsort(descending=True)[:2]
        weights = probabilities[best] / probabilities[best].sum()
        expected[place] = sum(
            weight * mixture.experts[int(number)](x[place])[0] for weight, number in zip(weights, best, strict=True)
        )
    torch.testing.assert_close(mixed, expected, rtol=1e-6, atol=1e-7)  # the router's softmax is in float32


def test_an_expert_without_tokens_has_a_gradient_of_zero() -> None:
    """A missing one would leave the ranks with different gradients to sum."""
    torch.manual_seed(3)
    mixture = MixtureOfExperts(6, 12, 8, 1)
    mixed, balance = mixture(torch.randn(1, 2, 6))
    (mixed.sum() + balance).backward()
    gradients = [expert.down.weight.grad for expert in mixture.experts]
    assert all(gradient is not None for gradient in gradients)
    assert sum(bool(gradient.any()) for gradient in gradients) <= 2
    assert mixture.router.weight.grad is not None


def test_the_balance_loss_is_1_for_equal_shares_and_grows_to_the_number_of_experts() -> None:
    equal = balance_loss(torch.full((12, 4), 0.25), torch.tensor([3, 3, 3, 3]))
    everything = balance_loss(torch.tensor([[0.0, 1.0, 0.0, 0.0]] * 12), torch.tensor([0, 12, 0, 0]))
    assert (equal.item(), everything.item()) == (1.0, 4.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heads": 5}, r"model\.width=24 must be a multiple of model\.heads=5"),
        ({"heads": 8}, r"even width of a head"),
        ({"positions": "sine"}, r"model\.positions='sine'"),
        ({"experts": 2, "experts_per_token": 3}, r"model\.experts_per_token=3"),
        ({"experts": -1}, r"model\.experts=-1"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        network(**options)


def test_a_sequence_longer_than_the_context_is_refused() -> None:
    with pytest.raises(ValueError, match=r"model\.context=16"):
        network()(random_tokens(length=17))
