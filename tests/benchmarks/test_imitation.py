"""The comparison of imitation, GRPO and distillation, with a policy that is hardly trained."""

from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.algorithms.run import Sampler, open_policy, train_batch
from benchmarks.imitation.on_policy import Course, Point, draw_curves, train_on_samples
from benchmarks.imitation.skill import SKILL, record_episodes
from benchmarks.imitation.small_model import sample_after_prefix
from benchmarks.imitation.teacher import Teacher
from flotilla_environments.tiny_policy.build import build
from flotilla_environments.tiny_policy.evaluate import load_player
from flotilla_environments.tiny_policy.sampler import Limits, sample_turns
from flotilla_environments.tiny_policy.tokenizer import TURN_END
from flotilla_rollout.adapters.tokenizer import load_tokenizer
from tests.environments.tiny_policy.conftest import MINI
from tests.support.shared_folders import SharedFolders


@pytest.fixture(scope="session")
def start(shared_folders: SharedFolders) -> Path:
    return shared_folders.filled_by(lambda path: build(path, MINI), "mini-policy")


def test_a_teacher_scores_the_tokens_that_were_sampled_by_its_own_parameters(
    start: Path, tmp_path: Path
) -> None:
    trained = open_policy(start).named_parameters()
    with torch.no_grad():
        trained["model.norm.weight"].mul_(1.5)
    torch.save(trained, tmp_path / "last.pt")
    sampler = Sampler(start, seed=0, env_keys=(SKILL,))
    batch = train_batch(1, sampler.sample(0, groups=1))
    own = Teacher(start, _save_parameters(start, tmp_path)).teach(batch)
    others = Teacher(start, tmp_path / "last.pt").teach(batch)
    assert own.settings.taught
    for sequence, same, other in zip(batch.sequences, own.sequences, others.sequences, strict=True):
        sampled = sequence.behaviour_logprobs[sequence.policy_mask]
        assert same.teacher is not None
        assert other.teacher is not None
        assert same.teacher.logprobs == pytest.approx(sampled, abs=1e-4)
        assert np.abs(other.teacher.logprobs - sampled).max() > 0.01


def test_an_episode_counts_as_solved_only_if_it_made_the_order_and_ended(start: Path) -> None:
    tokenizer = load_tokenizer(start)
    episodes = record_episodes(start, seed=0)
    written = [tokenizer.decode(each.token_ids[each.policy_mask].tolist()) for each in episodes]
    solved = [text for text, each in zip(written, episodes, strict=True) if each.reward == 1.0]
    assert 0 < len(solved) < len(episodes)
    assert all("create_order" in text and text.endswith(f"<done>{TURN_END}") for text in solved)
    assert any("create_order" not in text for text in written if text not in solved)


def test_turns_after_a_shared_prefix_are_those_of_the_plain_sampler(start: Path) -> None:
    player = load_player(start)
    stop = player.dialect.stop_ids[0]
    common = player.tokenizer.encode("find_customer find_item create_order")
    prompts = [[*common, *player.tokenizer.encode(end)] for end in ("Ann apple", "Bob", "Ann tea")]
    limits = Limits(frozenset({stop}), max_new_tokens=20)
    plain = sample_turns(player.model, prompts, limits, torch.Generator().manual_seed(0))
    after = sample_after_prefix(player.model, prompts, stop, most_tokens=20)
    assert after == [turn.ids for turn in plain]


def test_held_out_tasks_played_on_the_way_change_nothing_of_a_run(start: Path) -> None:
    watched, unwatched = (
        train_on_samples(
            open_policy(start), Sampler(start, seed=0), Course(2, 2, 3, every), teacher=None
        )
        for every in (1, 2)
    )
    assert [watched[0], watched[-1]] == unwatched
    assert 0 == watched[0].tokens < watched[1].tokens < watched[2].tokens


def test_curves_are_drawn_by_the_tokens_that_were_sampled(tmp_path: Path) -> None:
    curves = [[Point(0, 1), Point(2000, 9)], [Point(0, 2), Point(3000, 8)]]
    draw_curves(tmp_path / "curves.svg", {"GRPO": curves}, tasks=10)
    picture = (tmp_path / "curves.svg").read_text()
    assert "<!-- GRPO, seed 1 -->" in picture and "tokens sampled" in picture
    assert "optimizer step" not in picture


def _save_parameters(start: Path, folder: Path) -> Path:
    torch.save(open_policy(start).named_parameters(), folder / "same.pt")
    return folder / "same.pt"
