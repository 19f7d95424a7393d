"""Share of tasks that a policy solves, sampled and greedy, on environments in this process."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import Qwen3ForCausalLM

from flotilla_environments.api import ENV_KEYS
from flotilla_environments.gsm8k.arithmetic import make_problem
from flotilla_environments.gsm8k.verifiers.strict import marked_number
from flotilla_environments.task_generator import Split, draw_scenario, make_data_id
from flotilla_environments.tiny_policy import arithmetic
from flotilla_environments.tiny_policy.episodes import PlayedEpisode, Player, play_tasks
from flotilla_environments.tiny_policy.sampler import Limits, sample_turns
from flotilla_rollout.adapters.tokenizer import load_tokenizer

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


@dataclass(frozen=True)
class Measured:
    """Score with its split, temperature and environment."""

    split: str
    temperature: float
    environment: str
    score: Score


def load_player(folder: Path) -> Player:
    """Read a policy folder. Raises `OSError` for any other folder."""
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return Player.of(model, load_tokenizer(folder))


def evaluate(
    player: Player, split: Split, tasks_per_env: int, *, temperature: float, seed: int
) -> dict[str, Score]:
    """Return scores by environment, and under "all", over the first tasks of a split."""
    drawn = [
        draw_scenario(env_key, make_data_id(split, index))
        for index in range(tasks_per_env)
        for env_key in ENV_KEYS
    ]
    generator = torch.Generator().manual_seed(seed)
    episodes = play_tasks(player, drawn, temperature=temperature, generator=generator)
    by_env = {
        env_key: _score_episodes([e for e in episodes if e.instance.env_key == env_key])
        for env_key in ENV_KEYS
    }
    return {"all": _score_episodes(episodes), **by_env}


def evaluate_arithmetic(player: Player, problems: int, *, temperature: float, seed: int) -> Score:
    """Return the share of held-out problems whose marked number is the answer."""
    drawn = [make_problem("test", index) for index in range(problems)]
    turns = sample_turns(
        player.model,
        [arithmetic.prompt_ids(player.dialect, one) for one in drawn],
        Limits(frozenset({player.dialect.stop_ids[0]}), temperature=temperature),
        torch.Generator().manual_seed(seed),
    )
    numbers = [marked_number(player.tokenizer.decode(turn.ids)) for turn in turns]
    right = [number == str(one.answer) for number, one in zip(numbers, drawn, strict=True)]
    return Score(sum(right), len(right))


def measure_policy(player: Player, course: str, tasks: int, seed: int) -> Iterator[Measured]:
    """Yield sampled and greedy scores of a policy in its course, over `tasks` an environment."""
    if course == "arithmetic":
        for temperature in (1.0, 0.0):
            score = evaluate_arithmetic(player, tasks, temperature=temperature, seed=seed)
            yield Measured("test", temperature, arithmetic.ENV_KEY, score)
        return
    runs: list[tuple[Split, float]] = [("heldout", 1.0), ("heldout", 0.0), ("unseen_names", 1.0)]
    for split, temperature in runs:
        scores = evaluate(player, split, tasks, temperature=temperature, seed=seed)
        for name, score in scores.items():
            yield Measured(split, temperature, name, score)


def _score_episodes(episodes: Sequence[PlayedEpisode]) -> Score:
    return Score(sum(episode.solved for episode in episodes), len(episodes))
