"""The run spec that trains a tiny policy on the tools of a folder of `flotilla init`, on a machine
without a GPU. Pure."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from flotilla_reading.own_tools.toml_text import quote, to_toml

SPEC, MODEL = "laptop.toml", "tiny"
# Held-out tasks are attempted so often at T = 1, and once greedily.
HELDOUT, GREEDY = "heldout", "greedy"
_ATTEMPTS, _SPARE = 16, 2
# Of a step, where there are so many.
_GROUPS, _SEQUENCES = 8, 32


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of the longest first prompt, demonstration, and turn of one, with the tokenizer of the
    policy; `turns` of the longest demonstration."""

    prompt: int
    demonstration: int
    turn: int
    turns: int


def write_laptop_spec(run_spec: Mapping[str, Any], lengths: Lengths, demonstrations: int) -> str:
    """Return a spec with the name, the seed and the gateway of another one, with room for twice the
    longest demonstration beyond its prompt, and with steps of no more than all demonstrations."""
    turn = _round_up(lengths.turn * 3 // 2, 16)
    window = lengths.prompt + 2 * max(lengths.demonstration - lengths.prompt, lengths.turn) + turn
    window = _round_up(window, 64)
    gateway = dict(run_spec["env_gateway"])
    gateway["warm_starts"] = {**gateway.get("warm_starts", {}), "size": _ATTEMPTS + _SPARE}
    name = to_toml(f"{run_spec['name']}-laptop")
    return (
        _HEAD.format(name=name, seed=run_spec.get("seed", 0), window=window)
        + "".join(f"{line}\n" for line in _write_table(("env_gateway",), gateway))
        + _REST.format(
            attempts=_ATTEMPTS,
            turns=lengths.turns + 3,
            turn=turn,
            longest=window - turn,
            groups=min(_GROUPS, demonstrations),
            sequences=min(_SEQUENCES, demonstrations),
        )
    )


def _write_table(
    path: tuple[str, ...], table: Mapping[str, Any], brackets: tuple[str, str] = ("[", "]")
) -> Iterator[str]:
    """Yield the lines of a table, and of those in it and of the lists of tables in it."""
    yield f"\n{brackets[0]}{'.'.join(map(_quote_key, path))}{brackets[1]}"
    tables = {name: value for name, value in table.items() if _is_tables(value)}
    plain = {name: value for name, value in table.items() if name not in tables}
    yield from (f"{_quote_key(name)} = {to_toml(value)}" for name, value in plain.items())
    for name, value in tables.items():
        if isinstance(value, Mapping):
            yield from _write_table((*path, name), value)
        else:
            for each in value:
                yield from _write_table((*path, name), each, ("[[", "]]"))


def _is_tables(value: Any) -> bool:
    if isinstance(value, list):
        found = cast("list[Any]", value)
        return bool(found) and all(isinstance(each, Mapping) for each in found)
    return isinstance(value, Mapping)


def _quote_key(name: str) -> str:
    plain = name.isascii() and name.replace("_", "").replace("-", "").isalnum()
    return name if plain else quote(name)


def _round_up(count: int, step: int) -> int:
    return -(-count // step) * step


_HEAD = """\
# Trains a tiny policy on the tools of run.toml, on a machine without a GPU: it imitates
# demonstrations.jsonl first, and then learns from its own attempts. `flotilla init --train` has
# written this file, and writes it anew.

name = {name}
seed = {seed}

[policy]
# Built from demonstrations.jsonl: `flotilla tiny fit`.
model = "tiny"
dtype = "float32"
# Tokens: the longest prompt, and twice the longest demonstration after it.
max_model_len = {window}
"""

_REST = """
[rollout]
# Concurrent attempts.
max_attempts = {attempts}
max_turns = {turns}
max_input_length = {longest}
# Half more than the longest turn of a demonstration.
max_generate_length = {turn}

[rollout.dialect]
name = "template"

[rollout.engine]
device = "cpu"
max_num_seqs = {attempts}

[learner]
tasks = "tasks/train.jsonl"
# Of reinforcement learning, after those of the warm start.
steps = 25
groups_per_step = {groups}
group_size = 8
max_staleness = 1

[learner.warm_start]
# `flotilla sft laptop.toml --from demonstrations.jsonl --warm-start` sets `data`.
data = "demonstrations.npz"
# Few: who is sure of everything tries nothing else in GRPO.
steps = 12
sequences_per_step = {sequences}
lr = 1e-3

[learner.algorithm]
advantage = "grpo"
clip_low = 0.2
clip_high = 0.28

[learner.optimizer]
lr = 1e-3
betas = [0.9, 0.95]
warmup_steps = 3
grad_clip = 1.0

[learner.checkpoint]
every = 10

[learner.eval]
# Before, after the warm start, and at the end.
every = 0
# How long training waits for an evaluation: on a slow machine the first takes minutes to begin.
hold_s = 900

[[learner.eval.sets]]
name = "heldout"
tasks = "tasks/heldout.jsonl"
attempts = 4

[[learner.eval.sets]]
name = "greedy"
tasks = "tasks/heldout.jsonl"
temperature = 0.0
"""
