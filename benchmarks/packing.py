"""CPU of packed steps over padded ones, and of shared prompts: `python -m benchmarks.packing`.

Forward and backward passes of a random Qwen3, whose shape is the argument's, over one batch:

- padded: 16 sequences of 64 to 1024 tokens, log-uniform, padded to the longest, with transformers'
  own attention; against the ranks' packs of them. 40 % of their tokens are the policy's, and both
  sides apply the fused head only to these.
- shared: a group of 8 attempts whose prompt is 80 % of their tokens, packed by ranks, with
  `learner.rank.share_prompts` and without.

Both sides run in turns in one process, on one thread, and their losses and gradients are compared.
The last line is one JSON object:

- `packed`: CPU seconds of a packed step over those of a padded one, the median of the pairs.
- `shared`: the same for shared prompts over repeated ones.
- `padded_share`: the share of the padded tokens that are padding; `shared_prompt_share`: the share
  of the attempts' tokens that is not computed.
- `loss_diff`, `gradient_diff`: the largest relative differences.

About 3 minutes.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from flotilla_common.spec.spec import PolicyConfig
from flotilla_learner.algo.logprob_head import fused_policy_loss
from flotilla_learner.config.rank import RankConfig
from flotilla_learner.rank.data_parallel import Replicas
from flotilla_learner.rank.model import Policy
from flotilla_learner.rank.packed_rows import PackTargets, RowPacker
from flotilla_learner.rank.policy_loading import load_policy
from flotilla_learner.rank.rows import Row
from flotilla_learner.types import TrainSequence

# As in Qwen3-8B, an untied head has 8 % of the parameters.
SHAPE: Mapping[str, Any] = {
    "vocab_size": 2048,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
PACK_TOKENS, HEAD_CHUNK, PAIRS = 4096, 512, 5
SEQUENCES, SHORTEST, LONGEST, POLICY_SHARE = 16, 64, 1024, 0.4
GROUPS, ATTEMPTS, TOKENS, PROMPT_SHARE = 1, 8, 640, 0.8

Side = Callable[[], float]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=PAIRS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    with TemporaryDirectory() as folder:
        policy, plain = load_models(Path(folder))
    print(json.dumps(measure_packing(policy, plain, given.pairs)))


def load_models(folder: Path) -> tuple[Policy, Any]:
    """Return the policy as ranks load it, and the same model with transformers' attention."""
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**SHAPE)).save_pretrained(folder)
    config = PolicyConfig(model=str(folder), dtype="float32", max_model_len=LONGEST)
    plain: Any = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa")
    return load_policy(config, RankConfig()), plain.train()


def measure_packing(policy: Policy, plain: Any, pairs: int) -> dict[str, Any]:
    uneven, groups = list(uneven_rows()), list(group_rows())
    alone = replace(policy, shares_prompts=False)
    assert policy.shares_prompts
    found = {
        "packed": compare_sides(
            Pass(policy, packed_loss(policy, uneven)),
            Pass(plain, padded_loss(plain, uneven)),
            pairs,
        ),
        "shared": compare_sides(
            Pass(policy, packed_loss(policy, groups)),
            Pass(policy, packed_loss(alone, groups)),
            pairs,
        ),
    }
    return {
        **{name: one["cpu"] for name, one in found.items()},
        "padded_share": round(1 - row_tokens(uneven) / padded_tokens(uneven), 3),
        "shared_prompt_share": round(1 - computed_tokens(policy, groups) / row_tokens(groups), 3),
        "loss_diff": max(one["loss_diff"] for one in found.values()),
        "gradient_diff": max(one["gradient_diff"] for one in found.values()),
        "seconds": {name: one["seconds"] for name, one in found.items()},
    }


@dataclass(frozen=True)
class Pass:
    """Forward and backward pass over a batch; `losses` yields its parts."""

    model: Any
    losses: Callable[[], Iterator[Tensor]]

    def run(self) -> tuple[float, float, Tensor]:
        """Return the CPU seconds, the loss, and the gradient of the first block's values."""
        module = self.model.model if isinstance(self.model, Policy) else self.model
        module.zero_grad(set_to_none=True)
        began, loss = time.process_time(), 0.0
        for part in self.losses():
            part.backward()
            loss += float(part.detach())
        seconds = time.process_time() - began
        return seconds, loss, module.model.layers[0].self_attn.v_proj.weight.grad.clone()


def compare_sides(one: Pass, other: Pass, pairs: int) -> dict[str, Any]:
    seconds: list[tuple[float, float]] = []
    loss_diff = gradient_diff = 0.0
    # The first pair warms up.
    for _ in range(pairs + 1):
        (first, loss, grad), (second, plain_loss, plain_grad) = one.run(), other.run()
        seconds.append((first, second))
        loss_diff = max(loss_diff, abs(loss - plain_loss) / abs(plain_loss))
        gradient_diff = float((grad - plain_grad).abs().max() / plain_grad.abs().max())
    timed = seconds[1:]
    return {
        "cpu": round(statistics.median(first / second for first, second in timed), 3),
        "loss_diff": loss_diff,
        "gradient_diff": gradient_diff,
        "seconds": [[round(second, 2) for second in pair] for pair in timed],
    }


def uneven_rows() -> Iterator[Row]:
    """Yield sequences with an agent's lengths: many short ones and few long ones."""
    rng = np.random.default_rng(0)
    spread = np.exp(np.linspace(np.log(SHORTEST), np.log(LONGEST), SEQUENCES))
    for index, length in enumerate(rng.permutation(spread.astype(int))):
        token_ids = rng.integers(0, SHAPE["vocab_size"], length).astype(np.int32)
        yield make_row(index, token_ids, round(length * (1 - POLICY_SHARE)))


def group_rows() -> Iterator[Row]:
    """Yield groups of attempts with the same prompt."""
    rng = np.random.default_rng(0)
    prompt = int(TOKENS * PROMPT_SHARE)
    for group in range(GROUPS):
        shared = rng.integers(0, SHAPE["vocab_size"], prompt)
        for attempt in range(ATTEMPTS):
            own = rng.integers(0, SHAPE["vocab_size"], TOKENS - prompt)
            token_ids = np.concatenate([shared, own]).astype(np.int32)
            yield make_row(group * ATTEMPTS + attempt, token_ids, prompt)


def make_row(index: int, token_ids: np.ndarray, prompt: int) -> Row:
    mask = np.arange(len(token_ids)) >= prompt
    logprobs = np.zeros(len(token_ids), np.float32)
    sequence = TrainSequence("g", 0, 0.0, token_ids, mask, logprobs, 1.0, 0)
    return Row.from_sequence(index, sequence)


def packed_loss(policy: Policy, rows: Sequence[Row]) -> Callable[[], Iterator[Tensor]]:
    """Return the passes of a rank: its packs, and the fused head on policy tokens."""
    packer = RowPacker(policy, PACK_TOKENS, Replicas())

    def passes() -> Iterator[Tensor]:
        for pack in packer.iter_packs(rows):
            targets = PackTargets.from_pack(pack, policy.device)
            hidden = policy.segment_states(pack.segments)[targets.positions]
            yield head_loss(policy, hidden, targets.token_ids)

    return passes


def padded_loss(plain: Any, rows: Sequence[Row]) -> Callable[[], Iterator[Tensor]]:
    """Return the passes of padded rows, with the same head on policy tokens only."""

    width = max(len(row.token_ids) for row in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for place, row in enumerate(rows):
        ids[place, : len(row.token_ids)] = torch.from_numpy(row.token_ids)
        mask[place, : len(row.token_ids)] = 1
    targets = np.concatenate([row.token_ids[row.positions + 1] for row in rows])

    def passes() -> Iterator[Tensor]:
        states = plain.model(input_ids=ids, attention_mask=mask, use_cache=False)[0]
        hidden = torch.cat([s[row.positions] for s, row in zip(states, rows, strict=True)])
        yield head_loss(plain, hidden, torch.from_numpy(targets.astype(np.int64)))

    return passes


def head_loss(model: Any, hidden: Tensor, targets: Tensor) -> Tensor:
    weight = model.head if isinstance(model, Policy) else model.lm_head.weight
    ones = torch.ones(len(targets))
    loss, _, _ = fused_policy_loss(
        hidden, weight, targets, ones, lambda logprobs, _: -logprobs, chunk=HEAD_CHUNK
    )
    return loss


def row_tokens(rows: Sequence[Row]) -> int:
    return sum(len(row.token_ids) for row in rows)


def computed_tokens(policy: Policy, rows: Sequence[Row]) -> int:
    packs = RowPacker(policy, PACK_TOKENS, Replicas()).iter_packs(rows)
    return sum(sum(pack.segments.lengths) for pack in packs)


def padded_tokens(rows: Sequence[Row]) -> int:
    return len(rows) * max(len(row.token_ids) for row in rows)


if __name__ == "__main__":
    main()
