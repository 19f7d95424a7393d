"""A learner that trains adapters and publishes them alone, in this process."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from flotilla_common.domain.policy import PolicyId
from flotilla_learner.rank.canary import canary_token_ids
from flotilla_learner.rank.model import score_tokens
from flotilla_learner.rank.rank_setup import RankSetup, load_models
from flotilla_learner.rank.weight_slots import WeightSlots
from flotilla_rollout.types import Publication
from tests.support.rank_configs import ALONE, policy_config
from tests.support.tiny_ranks import make_batch

RANK = 4


def adapted_setup(folder: Path, shm: Path, **policy: object) -> RankSetup:
    """The message that such a rank is given, for the model in `folder`."""
    shm.mkdir(exist_ok=True)
    return RankSetup.model_validate(
        {
            "name": "run",
            "shm_dir": shm,
            "total_steps": 20,
            "policy": policy_config(folder, adapter_rank=RANK, **policy),
            "algorithm": {},
            "optimizer": {"lr": 1e-2},
            "rank": {"pack_tokens": 256, "head_chunk": 16},
            "lora": {"rank": RANK, "alpha": 6.0},
            "place": ALONE,
        }
    )


class AdaptedLearner:
    """The first rank's models and slots; `canary` are its own logprobs of the last publication."""

    def __init__(self, folder: Path, shm: Path, **policy: object) -> None:
        self.setup = adapted_setup(folder, shm, **policy)
        self.models = load_models(self.setup)
        trained = self.models.policy
        self.slots = WeightSlots(
            trained.published_parameters(),
            trained.compute_dtype,
            shm,
            "run",
            merge=trained.published_tensor,
            marks=self.models.publication_marks,
        )
        self.version = 0
        self.canary = np.zeros(0, np.float32)
        self.folder = folder

    def train(self) -> None:
        self.version += 1
        self.models.trainer.train_step(make_batch(step=self.version), 1e-2)

    def publish(self) -> Publication:
        """Write the current adapters; return the publication that a rollout receives."""
        policy = self.models.policy
        path, fingerprint, manifest = self.slots.write_version(self.version)
        ids = canary_token_ids(policy.vocabulary)
        self.canary = score_tokens(policy, ids, chunk=512)
        named = PolicyId(1, self.version, fingerprint)
        total = self.slots.total_bytes
        return Publication(named, manifest, total, "shm", str(path), ids, timeout_s=120.0)

    def train_and_publish(self) -> Publication:
        self.train()
        return self.publish()

    @torch.no_grad()
    def merged_model(self) -> PreTrainedModel:
        """Return a model without adapters that is the same policy."""
        adapters = self.models.policy.adapters
        assert adapters is not None
        sees = self.setup.policy.vision is not None
        kind = AutoModelForImageTextToText if sees else AutoModelForCausalLM
        model = kind.from_pretrained(self.folder, dtype=torch.float32).eval()
        for name, parameter in model.named_parameters():
            parameter.copy_(adapters.merge(name, parameter.clone()))
        return model


def damaged(publication: Publication, folder: Path) -> Publication:
    """Return the publication in another file, with one changed bit in its last tensor."""
    raw = np.fromfile(publication.location, np.uint8)
    raw[publication.manifest[-1].offset_bytes] ^= 1
    raw.tofile(folder / "damaged")
    return replace(publication, location=str(folder / "damaged"))


@torch.no_grad()
def logprobs_across(
    old: PreTrainedModel, new: PreTrainedModel, ids: NDArray[np.int32], switch: int
) -> NDArray[np.float32]:
    """Return the logprobs of tokens 1..n-1 where those from `switch` on are the new model's, which
    builds on the old one's keys and values: it computes from the token before `switch`."""
    tokens = torch.tensor(ids.tolist())
    before = old(tokens[None, : switch - 1], use_cache=True)
    after = new(tokens[None, switch - 1 :], past_key_values=before.past_key_values)
    logits = torch.cat([before.logits[0], after.logits[0]])[:-1].float()
    return torch.log_softmax(logits, -1).gather(-1, tokens[1:, None])[:, 0].numpy()
