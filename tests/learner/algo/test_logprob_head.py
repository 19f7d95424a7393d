from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from flotilla_learner.algo import logprob_head
from flotilla_learner.algo.logprob_head import fused_policy_loss, token_logprobs
from flotilla_learner.algo.objective import Objective, PackLoss
from tests.learner.algo.support import Sample, config, sample

LENGTHS = (9, 1, 15, 12)
TOKENS, WIDTH, VOCAB = sum(LENGTHS), 11, 53
OBJECTIVES: dict[str, dict[str, Any]] = {
    "ppo_clip": {},
    "cispo with entropy and KL": {
        "loss": "cispo",
        "entropy_coefficient": 0.3,
        "kl": {"coefficient": 0.2},
    },
    "gspo": {"loss": "gspo", "clip_low": 0.05, "clip_high": 0.05},
    "sequence corrections with entropy": {
        "proximal": "trainer",
        "entropy_coefficient": -0.3,
        "correction": {"sequence_tis": 1.5, "sequence_mask_geometric": [0.95, 1.05]},
    },
}


@dataclass
class Problem:
    hidden: Tensor
    weight: Tensor
    targets: Tensor
    temperature: Tensor
    drawn: Sample

    def pack(self, keys: dict[str, Any]) -> tuple[Objective, PackLoss]:
        """The objective on all sequences, every token weighing alike."""
        objective = Objective(config(**keys))
        every = [1 / TOKENS] * len(LENGTHS)
        _, tokens = self.drawn.pack(
            range(len(LENGTHS)), every, proximal=False, reference=objective.needs_reference_logprobs
        )
        return objective, objective.make_pack_loss(tokens)

    def fused(
        self,
        keys: dict[str, Any],
        chunk: int,
        banned: Tensor | None = None,
        candidates: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        objective, pack = self.pack(keys)
        return fused_policy_loss(
            self.hidden,
            self.weight,
            self.targets,
            self.temperature,
            pack,
            chunk=chunk,
            coupled=objective.coupled,
            entropy_weights=pack.entropy_weights,
            banned=banned,
            candidates=candidates,
        )

    def naive(
        self, keys: dict[str, Any], kept: Tensor | list[Tensor] | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute them by the full matrix of logits, with autograd through all of it; only the ids
        in `kept`, by default all, can be sampled: everywhere, or at each position."""
        _, pack = self.pack(keys)
        logits = self.hidden @ self.weight.t() / self.temperature[:, None]
        kept = torch.arange(VOCAB) if kept is None else kept
        rows = kept if isinstance(kept, list) else [kept] * TOKENS
        log_probs = [row[ids].log_softmax(-1) for row, ids in zip(logits, rows, strict=True)]
        found = zip(log_probs, rows, self.targets, strict=True)
        logprobs = torch.stack([row[ids == target].squeeze() for row, ids, target in found])
        entropy = torch.stack([-(row.exp() * row).sum() for row in log_probs])
        everything = slice(0, TOKENS)
        loss = pack(logprobs, everything).sum()
        return loss + (pack.entropy_weights(everything) * entropy).sum(), logprobs, entropy


def problem() -> Problem:
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    hidden, weight = normal(TOKENS, WIDTH), normal(VOCAB, WIDTH)
    targets = torch.randint(VOCAB, (TOKENS,), generator=generator)
    temperature = torch.linspace(0.5, 1.5, TOKENS, dtype=torch.float64)
    drawn = sample(LENGTHS)
    made = Problem(hidden.requires_grad_(), weight.requires_grad_(), targets, temperature, drawn)
    exact = token_logprobs(hidden, weight, targets, temperature, chunk=TOKENS)
    drawn.behaviour[:] = exact + 0.2 * normal(TOKENS)
    drawn.reference[:] = exact + 0.2 * normal(TOKENS)
    return made


@pytest.mark.parametrize("chunk", [1, 8, 64])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_equals_the_naive_head_in_float64_with_its_gradients(name: str, chunk: int) -> None:
    case = problem()
    fused, naive = case.fused(OBJECTIVES[name], chunk), case.naive(OBJECTIVES[name])
    for ours, theirs in zip(fused, naive, strict=True):
        torch.testing.assert_close(ours.detach(), theirs.detach(), rtol=0, atol=1e-12)
    leaves = [case.hidden, case.weight]
    grads = torch.autograd.grad(fused[0], leaves), torch.autograd.grad(naive[0], leaves)
    assert all(bool(grad.abs().max() > 1e-3) for grad in grads[0])
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("chunk", [1, 8, 64])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_ids_that_are_never_sampled_are_as_if_they_were_not_there(name: str, chunk: int) -> None:
    case, keys = problem(), OBJECTIVES[name]
    banned = torch.tensor([0, 7, VOCAB - 1])
    kept = torch.tensor([id_ for id_ in range(VOCAB) if id_ not in banned])
    case.targets = kept[case.targets % len(kept)]
    fused, naive = case.fused(keys, chunk, banned), case.naive(keys, kept)
    for ours, theirs in zip(fused, naive, strict=True):
        torch.testing.assert_close(ours.detach(), theirs.detach(), rtol=1e-12, atol=1e-12)
    leaves = [case.hidden, case.weight]
    grads = torch.autograd.grad(fused[0], leaves), torch.autograd.grad(naive[0], leaves)
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    assert not grads[0][1][banned].any()
    scored = token_logprobs(
        *(case.hidden, case.weight, case.targets, case.temperature), chunk=chunk, banned=banned
    )
    torch.testing.assert_close(scored, naive[1].detach(), rtol=1e-12, atol=1e-12)
    assert (fused[1] - case.naive(keys)[1]).abs().max() > 1e-3


def drawn_candidates(targets: Tensor) -> list[Tensor]:
    """Return different candidates at each position, the target among them: from it alone to all."""
    generator = torch.Generator().manual_seed(7)
    counts = [1, VOCAB, *torch.randint(2, 20, (TOKENS - 2,), generator=generator).tolist()]
    found: list[Tensor] = []
    for target, count in zip(targets.tolist(), counts, strict=True):
        order = torch.randperm(VOCAB, generator=generator)
        others = order[order != target][: count - 1]
        # Anywhere among them.
        at = int(torch.randint(count, (1,), generator=generator))
        found.append(torch.cat([others[:at], torch.tensor([target]), others[at:]]))
    return found


def padded(rows: list[Tensor]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1)


@pytest.mark.parametrize("chunk", [1, 8, 64])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_tokens_are_scored_among_the_candidates_of_their_position(name: str, chunk: int) -> None:
    case, keys = problem(), OBJECTIVES[name]
    rows = drawn_candidates(case.targets)
    candidates = padded(rows)
    # A position without candidates is scored among all ids.
    candidates[5], rows[5] = -1, torch.arange(VOCAB)
    fused, naive = case.fused(keys, chunk, candidates=candidates), case.naive(keys, rows)
    for ours, theirs in zip(fused, naive, strict=True):
        torch.testing.assert_close(ours.detach(), theirs.detach(), rtol=1e-12, atol=1e-12)
    leaves = [case.hidden, case.weight]
    grads = torch.autograd.grad(fused[0], leaves), torch.autograd.grad(naive[0], leaves)
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    scored = token_logprobs(
        *(case.hidden, case.weight, case.targets, case.temperature),
        chunk=chunk,
        candidates=candidates,
    )
    torch.testing.assert_close(scored, naive[1].detach(), rtol=1e-12, atol=1e-12)
    # What has one candidate only is certain.
    assert scored[0] == 0 and fused[2][0] == 0
    assert (scored - case.naive(keys)[1])[2:5].abs().min() > 1e-3


def test_float32_scores_among_candidates_are_those_of_float64() -> None:
    case = problem()
    rows = drawn_candidates(case.targets)
    columns = (case.hidden, case.weight, case.targets, case.temperature)
    single = [each.detach().float() if each.is_floating_point() else each for each in columns]
    found = token_logprobs(*single, chunk=8, candidates=padded(rows))
    exact = case.naive(OBJECTIVES["ppo_clip"], rows)[1].detach()
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=2e-6)


@pytest.mark.parametrize(
    "keys", [{"loss": "importance_sampling"}, {"clip_low": 0.9, "entropy_coefficient": 0.3}]
)
def test_the_gradient_among_candidates_is_that_of_finite_differences(keys: dict[str, Any]) -> None:
    case = problem()
    candidates = padded(drawn_candidates(case.targets))

    def value() -> float:
        return float(case.fused(keys, 8, candidates=candidates)[0])

    loss, *_ = case.fused(keys, 8, candidates=candidates)
    grads = torch.autograd.grad(loss, [case.hidden, case.weight])
    generator = torch.Generator().manual_seed(1)
    for leaf, grad in zip((case.hidden, case.weight), grads, strict=True):
        along = torch.randn(leaf.shape, generator=generator, dtype=torch.float64)
        with torch.no_grad():
            leaf += 1e-6 * along
            above = value()
            leaf -= 2e-6 * along
            slope = (above - value()) / 2e-6
            leaf += 1e-6 * along
        assert slope == pytest.approx(float((grad * along).sum()), abs=1e-8, rel=1e-6)
        assert abs(slope) > 1e-3


def test_a_frozen_head_is_spared_its_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = OBJECTIVES["cispo with entropy and KL"]
    case, frozen = problem(), problem()
    frozen.weight.requires_grad_(False)
    (expected,) = torch.autograd.grad(case.fused(keys, 16)[0], case.hidden)

    def refuse(*_: Tensor, first: bool) -> None:
        raise AssertionError("the head's gradient is computed")

    monkeypatch.setattr(logprob_head, "_accumulate_gradient", refuse)
    with pytest.raises(AssertionError):
        case.fused(keys, 16)
    (grad,) = torch.autograd.grad(frozen.fused(keys, 16)[0], frozen.hidden)
    assert grad.equal(expected)


def check(case: Problem, loss: Callable[[Tensor, Tensor], Tensor]) -> bool:
    return torch.autograd.gradcheck(loss, (case.hidden, case.weight), fast_mode=True)


def test_passes_the_numerical_gradient_check() -> None:
    case = problem()

    def loss(hidden: Tensor, weight: Tensor) -> Tensor:
        moved = Problem(hidden, weight, case.targets, case.temperature, case.drawn)
        return moved.fused({"kl": {"coefficient": 0.2}, "entropy_coefficient": 0.3}, 16)[0]

    assert check(case, loss)


def test_an_entropy_bonus_alone_passes_the_numerical_gradient_check_and_raises_entropy() -> None:
    case = problem()

    def bonus(hidden: Tensor, weight: Tensor) -> Tensor:
        return fused_policy_loss(
            hidden,
            weight,
            case.targets,
            case.temperature,
            lambda logprobs, _: logprobs * 0,
            chunk=16,
            entropy_weights=lambda span: torch.full((TOKENS,), -1.0).double()[span],
        )[0]

    assert check(case, bonus)
    (grad,) = torch.autograd.grad(bonus(case.hidden, case.weight), case.hidden)
    before = case.naive({})[2].sum()
    case.hidden = (case.hidden - 0.01 * grad).detach()
    assert case.naive({})[2].sum() > before


def test_scales_with_the_gradient_that_comes_in() -> None:
    case = problem()
    grads = [
        torch.autograd.grad(factor * case.fused({}, 16)[0], case.weight)[0]
        for factor in (1.0, -2.5)
    ]
    torch.testing.assert_close(grads[1], -2.5 * grads[0])


def test_bfloat16_input_gives_float32_logprobs_near_the_exact_ones() -> None:
    case = problem()
    _, logprobs, _ = fused_policy_loss(
        case.hidden.detach().bfloat16().requires_grad_(),
        case.weight.detach().float().requires_grad_(),
        case.targets,
        case.temperature.float(),
        lambda values, _: -values,
        chunk=16,
    )
    assert logprobs.dtype == torch.float32
    assert (logprobs.double() - case.naive({})[1]).abs().max() < 0.2


def test_scoring_alone_gives_the_same_logprobs_and_none_of_nothing() -> None:
    case = problem()
    got = token_logprobs(case.hidden, case.weight, case.targets, case.temperature, chunk=5)
    torch.testing.assert_close(got, case.naive({})[1].detach())
    nothing = torch.zeros(0, dtype=torch.int64)
    assert token_logprobs(case.hidden[:0], case.weight, nothing, got[:0], chunk=5).shape == (0,)


def test_a_likely_token_of_a_large_vocabulary_has_its_exact_logprob() -> None:
    """torch's softmax loses the unlikely tokens beside it, on a CPU."""
    torch.manual_seed(0)
    hidden = torch.randn(6, 8)
    weight = torch.randn(262_144, 8) * 0.05
    targets = torch.arange(6) * 1_000
    # The others have a hundredth of a row's probability together, and none a ten-millionth.
    weight[targets] = hidden / hidden.square().sum(-1, keepdim=True) * 17
    ones = torch.ones(6)
    found = token_logprobs(hidden, weight, targets, ones, chunk=4)
    exact = (hidden.double() @ weight.double().t()).log_softmax(-1)
    exact = exact.gather(1, targets[:, None]).squeeze(1)
    assert (exact < -0.005).all()
    torch.testing.assert_close(found.double(), exact, atol=3e-6, rtol=0)


@pytest.mark.parametrize("chunk", [1, 4, 64])
def test_several_targets_at_a_position_share_its_logits(chunk: int) -> None:
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(7, WIDTH, generator=generator, dtype=torch.float64).requires_grad_()
    weight = torch.randn(VOCAB, WIDTH, generator=generator, dtype=torch.float64).requires_grad_()
    # One of them twice at a position.
    targets = torch.randint(0, VOCAB, (7, 3), generator=generator)
    targets[2, 1] = targets[2, 0]
    weights = torch.randn(7, 3, generator=generator, dtype=torch.float64)
    plain = (hidden @ weight.t() / 0.7).log_softmax(-1).gather(1, targets)
    expected = torch.autograd.grad((plain**2 * weights).sum(), (hidden, weight))
    temperature = torch.full((7,), 0.7, dtype=torch.float64)
    loss, logprobs, _ = fused_policy_loss(
        *(hidden, weight, targets, temperature),
        lambda part, span: part**2 * weights[span],
        chunk=chunk,
    )
    torch.testing.assert_close(logprobs, plain.detach())
    torch.testing.assert_close(torch.autograd.grad(loss, (hidden, weight)), expected)
    scored = token_logprobs(hidden.detach(), weight.detach(), targets, temperature, chunk=chunk)
    torch.testing.assert_close(scored, plain.detach())
