"""How often a policy solves tasks, sampled and greedy, on environments in this process."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import Qwen3ForCausalLM

from environments.api import ENV_KEYS
from environments.scenario import Split, data_id, scenario
from services.rollout.adapters.tokenizer import load_tokenizer
from tools.tiny_policy.episodes import Episode, Player, play

STANDARD_NORMAL_975 = 1.959964


@dataclass(frozen=True)
class Score:
    """Attempts and how many of them solved their task."""

    solved: int
    attempts: int

    @property
    def pass_at_1(self) -> float:
        return self.solved / self.attempts

    @property
    def interval(self) -> tuple[float, float]:
        """95 % Wilson score interval (Wilson 1927) of the pass rate."""
        z, n, p = STANDARD_NORMAL_975, self.attempts, self.pass_at_1
        centre = (p + z * z / (2 * n)) / (1 + z * z / n)
        half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
        return max(0.0, centre - half), min(1.0, centre + half)


def load_player(folder: Path) -> Player:
    """Read a policy folder. Raises `OSError` when it is not one."""
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return Player.of(model, load_tokenizer(folder))


def evaluate(
    player: Player, split: Split, tasks_per_env: int, *, temperature: float, seed: int
) -> dict[str, Score]:
    """Scores by environment, and under "all", over the first tasks of a split."""
    drawn = [
        scenario(env_key, data_id(split, index))
        for index in range(tasks_per_env)
        for env_key in ENV_KEYS
    ]
    generator = torch.Generator().manual_seed(seed)
    episodes = play(player, drawn, temperature=temperature, generator=generator)
    by_env = {
        env_key: _score([e for e in episodes if e.instance.env_key == env_key])
        for env_key in ENV_KEYS
    }
    return {"all": _score(episodes), **by_env}


def _score(episodes: Sequence[Episode]) -> Score:
    return Score(sum(episode.solved for episode in episodes), len(episodes))
