"""Real environments in this process, played with the plain sampler like a rollout worker."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from transformers import Qwen3ForCausalLM

from flotilla_environments.api import Instance, ToolError, open_instance
from flotilla_environments.reference_policies import plan_calls
from flotilla_environments.task_generator import Scenario
from flotilla_environments.tiny_policy.demonstrations import prompt_ids
from flotilla_environments.tiny_policy.sampler import Limits, Sampled, sample_turns
from flotilla_rollout.dialects.template import TemplateDialect
from flotilla_rollout.dialects.turns import NO_CALL, OK, PARSE_ERROR, ParseError, Reply, ToolCall
from flotilla_rollout.tokenizer_port import Tokenizer

MAX_TURNS = 6


@dataclass(frozen=True)
class Player:
    """A policy with its tokenizer."""

    model: Qwen3ForCausalLM
    tokenizer: Tokenizer
    dialect: TemplateDialect

    @classmethod
    def of(cls, model: Qwen3ForCausalLM, tokenizer: Tokenizer) -> "Player":
        return cls(model.eval(), tokenizer, TemplateDialect(tokenizer, finish="done"))


@dataclass
class PlayedEpisode:
    """One attempt; `policy` marks the tokens the policy wrote, `logprobs` is 0 elsewhere."""

    instance: Instance
    ids: list[int]
    policy: list[bool] = field(default_factory=list[bool])
    logprobs: list[float] = field(default_factory=list[float])
    stop_reason: str | None = None
    solved: bool = False

    def write(self, turn: Sampled) -> None:
        self.ids += turn.ids
        self.policy += [True] * len(turn.ids)
        self.logprobs += turn.logprobs

    def observe(self, ids: Sequence[int]) -> None:
        self.ids += ids
        self.policy += [False] * len(ids)
        self.logprobs += [0.0] * len(ids)


def play_tasks(
    player: Player,
    tasks: Sequence[Scenario],
    *,
    temperature: float,
    generator: torch.Generator | None = None,
) -> list[PlayedEpisode]:
    """Play every task once, in lockstep. Solved: declared done, with the right final state."""
    limits = Limits(frozenset({player.dialect.stop_ids[0]}), temperature=temperature)
    episodes = [_open_episode(player, task) for task in tasks]
    for turn in range(MAX_TURNS):
        live = [episode for episode in episodes if episode.stop_reason is None]
        if not live:
            break
        sampled = sample_turns(player.model, [episode.ids for episode in live], limits, generator)
        for episode, written in zip(live, sampled, strict=True):
            episode.write(written)
            _take_step(player, episode, written, last=turn + 1 == MAX_TURNS)
    for episode in episodes:
        episode.solved = episode.stop_reason == "done" and is_solved(episode.instance)
        episode.instance.close()
    return episodes


def _open_episode(player: Player, task: Scenario) -> PlayedEpisode:
    instance = open_instance(task.env_key, task.data_id, task.data_version)
    episode = PlayedEpisode(instance, [])
    episode.observe(prompt_ids(player.dialect, task, instance.tools()))
    return episode


def _take_step(player: Player, episode: PlayedEpisode, written: Sampled, *, last: bool) -> None:
    """Execute a turn: append its replies, or end the episode."""
    dialect, before = player.dialect, np.array(episode.ids[: len(episode.ids) - len(written.ids)])
    turn = dialect.parse_turn(before, written.ids, ())
    replies = [_answer_call(episode.instance, item) for item in turn.items]
    replies = replies or [Reply(None, NO_CALL, ())]
    if turn.done:
        episode.stop_reason = "done"
    elif not turn.has_call and written.ids[-1] not in dialect.stop_ids:
        episode.stop_reason = "generation_length"
    elif last:
        episode.stop_reason = "max_turns"
    else:
        episode.observe(dialect.bridge_ids(before, written.ids, replies, ()))


def _answer_call(instance: Instance, item: ToolCall | ParseError) -> Reply:
    """Return the reply to one call."""
    if isinstance(item, ParseError):
        return Reply(item, PARSE_ERROR, [item.message])
    try:
        result = instance.call(item.name, json.loads(item.arguments_json))
    except ToolError as error:
        return Reply(item, "tool_error", [str(error)])
    return Reply(item, OK, [json.dumps(result)])


def is_solved(instance: Instance) -> bool:
    """Return whether the instance's whole state equals the result of the right calls."""
    task = instance.scenario
    twin = open_instance(task.env_key, task.data_id, task.data_version)
    for name, arguments in plan_calls(task):
        twin.call(name, arguments)
    same = all(
        instance.query("current", _all_rows(table)) == twin.query("current", _all_rows(table))
        for table in _dump_tables(twin)
    )
    twin.close()
    return same


def _dump_tables(instance: Instance) -> list[str]:
    query = "select name from sqlite_master where type = 'table' and name != 'task_facts'"
    return [row[0] for row in instance.query("seed", query).rows]


def _all_rows(table: str) -> str:
    return f"select * from {table} order by id"
