"""The files of a folder that `flotilla init` writes: the run spec, tasks, solutions and
demonstrations, and what `written/` holds. Pure, but for reading the latter.

Names, commands and values are data of others: they are quoted as TOML or JSON, and stand in no file
that Python runs."""

import hashlib
import json
import random
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flotilla_reading.own_tools.task_making import MadeTask
from flotilla_reading.own_tools.toml_text import to_toml
from flotilla_reading.play.ports import OfferedTool
from flotilla_reading.play.solutions import Solution, format_solutions

SPEC, TRAIN, HELDOUT = "run.toml", "tasks/train.jsonl", "tasks/heldout.jsonl"
STATE = "state"
_WRITTEN = Path(__file__).parent / "written"
_DIGESTS = "verifiers.sha256"


@dataclass(frozen=True, slots=True)
class ServerWish:
    """A server of the user's: a command over stdio, or a URL. `env` are variables of the command;
    `key_env` names the variable with a bearer key."""

    name: str
    command: tuple[str, ...] = ()
    url: str = ""
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    key_env: str = ""
    read_only: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class FolderPlan:
    """What the spec says: the environment's name, its servers, whether their episodes begin with a
    copy of a state, whether a process serves one episode after another, and whether episodes begin
    alike at all."""

    name: str
    servers: tuple[ServerWish, ...]
    has_state: bool
    reuses: bool
    resets: bool


def fixed_files(plan: FolderPlan) -> dict[str, bytes]:
    """Return the files that do not depend on tasks, by their place in the folder."""
    verifier = (_WRITTEN / "verifier.py").read_bytes()
    return {
        SPEC: write_spec(plan).encode(),
        "verifier.py": verifier,
        _DIGESTS: f"{hashlib.sha256(verifier).hexdigest()}  verifier.py\n".encode(),
        "README.md": (_WRITTEN / "README.md").read_bytes(),
        "tests/test_tasks.py": (_WRITTEN / "test_tasks.py").read_bytes(),
    }


def task_files(
    env: str, tools: Sequence[OfferedTool], tasks: Sequence[MadeTask], heldout: int, seed: int
) -> dict[str, bytes]:
    """Return the task files, of which `heldout` tasks are not trained on, with their solutions and
    the demonstrations of those that are."""
    mixed = random.Random(f"{seed}:split").sample(list(tasks), len(tasks))
    parts = {"heldout": mixed[:heldout], "train": mixed[heldout:]}
    keyed = {
        part: [(f"{env}-{part}-{number:04}", task) for number, task in enumerate(made)]
        for part, made in parts.items()
    }
    everything = [*keyed["train"], *keyed["heldout"]]
    return {
        TRAIN: _lines(task_fields(env, *each) for each in keyed["train"]),
        HELDOUT: _lines(task_fields(env, *each) for each in keyed["heldout"]),
        "solutions.jsonl": format_solutions(solution_of(*each) for each in everything),
        "demonstrations.jsonl": _lines(_demonstrate(*each, tools) for each in keyed["train"]),
    }


def task_fields(env: str, key: str, task: MadeTask) -> dict[str, Any]:
    """Return a task in the JSON of task files."""
    offered = {"offered_tools": list(task.offered)} if task.offered else {}
    return {
        "key": key,
        "env_id": env,
        "prompt": task.prompt,
        **offered,
        "metadata": dict(task.metadata),
    }


def solution_of(key: str, task: MadeTask) -> Solution:
    return Solution(key, task.calls, task.answer)


def _demonstrate(key: str, task: MadeTask, tools: Sequence[OfferedTool]) -> dict[str, Any]:
    """Return a solution as it was played, as a conversation to imitate."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": task.prompt}]
    for number, (call, result) in enumerate(zip(task.calls, task.results, strict=True)):
        function = {"name": call.name, "arguments": json.dumps(call.arguments)}
        made = {"id": f"call-{number}", "type": "function", "function": function}
        messages.append({"role": "assistant", "content": "", "tool_calls": [made]})
        messages.append({"role": "tool", "tool_call_id": made["id"], "content": result})
    answer = "Done." if task.answer is None else task.answer
    messages.append({"role": "assistant", "content": answer})
    offered = [tool for tool in tools if not task.offered or tool.name in task.offered]
    return {"messages": messages, "tools": [_offer(tool) for tool in offered], "key": key}


def _offer(tool: OfferedTool) -> dict[str, Any]:
    schema = {"type": "object", "properties": {}} | dict(tool.schema)
    function = {"name": tool.name, "description": tool.description, "parameters": schema}
    return {"type": "function", "function": function}


def _lines(rows: Iterable[Mapping[str, Any]]) -> bytes:
    return "".join(f"{json.dumps(row)}\n" for row in rows).encode()


def server_name(words: str, taken: Iterable[str]) -> str:
    """Return a name for a server, from its command or URL, that none of the others has."""
    plain = re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-")[:24] or "server"
    name, number, others = plain, 2, set(taken)
    while name in others:
        name, number = f"{plain}-{number}", number + 1
    return name


def write_spec(plan: FolderPlan) -> str:
    """Return the run spec, with a comment at every key."""
    names = [server.name for server in plan.servers]
    tables = "\n".join(_write_server(server, plan) for server in plan.servers)
    return (
        _HEAD.format(name=to_toml(plan.name))
        + tables
        + _ENVIRONMENT.format(env=to_toml(plan.name), servers=to_toml(names))
        + _REST
    )


def _write_server(server: ServerWish, plan: FolderPlan) -> str:
    lines = ["", "[[env_gateway.servers]]", "# By which environments name it."]
    lines += [f"name = {to_toml(server.name)}"]
    if server.url:
        lines += [
            "# All episodes share it: nothing brings its state back to the beginning.",
            f"url = {to_toml(server.url)}",
        ]
        if server.key_env:
            lines += [
                "# The variable with its bearer key.",
                f"api_key_env = {to_toml(server.key_env)}",
            ]
    else:
        lines += [
            "# Every episode has a process of it, and a folder of its own, {episode_dir}.",
            'transport = "stdio"',
            "# How it is started.",
            f"command = {to_toml(server.command)}",
        ]
        if server.env:
            lines += ["# Its variables; $NAME is the value of NAME when the gateway starts."]
            lines += [f"env = {to_toml(server.env)}"]
        if plan.has_state:
            lines += ["# What the episode's folder holds at first.", f"template = {to_toml(STATE)}"]
        lines += ["# It reads no FLOTILLA_ variable of the task, so it can be started ahead of it."]
        lines += ["task_variables = false"]
        lines += [
            "# It keeps nothing but the episode's folder, so that a process serves one episode",
            "# after another. `flotilla init` has tried: each began like the first.",
            f"state_in_folder = {'true' if plan.reuses else 'false'}",
        ]
    if server.read_only:
        lines += ["# Tools that only read, beside those that say so: verifiers may call no others."]
        lines += [f"read_only_tools = {to_toml(server.read_only)}"]
    return "\n".join(lines) + "\n"


_HEAD = """\
# Trains a policy on your own tools. All commands are for this folder; README.md has them.

# The run's name, a part of its id.
name = {name}
# Order of the tasks, and all random numbers.
seed = 0

[policy]
# A folder, or a model's name on the hub. Its chat template has to show tools.
model = "Qwen/Qwen3-4B"
# "float32" where the GPU has no bfloat16; it takes twice the memory.
dtype = "bfloat16"
# Tokens of a conversation: tools, prompt, all turns and results.
max_model_len = 16384

[env_gateway]
# MCP servers: the tables `servers` below.
backend = "mcp"

[env_gateway.warm_starts]
# Episodes' servers that are kept ready: a few more than rollout.max_attempts.
size = 36
"""

_ENVIRONMENT = """
[env_gateway.environments.{env}]
# Whose tools its tasks are offered, by `name`.
servers = {servers}
# Grades every task by the state that it ends in; what that is stands in the task.
verifier = "verifier.py"

[env_gateway.verifiers]
# The verifier's SHA-256: a verifier that is listed runs without a sandbox.
digests = "verifiers.sha256"
"""

_REST = """
[rollout]
# Concurrent attempts, each with its own servers.
max_attempts = 32
# Turns of an attempt.
max_turns = 8
# Tokens of a turn's input: all that came before it.
max_input_length = 15360
# Tokens that a turn may have.
max_generate_length = 1024

[rollout.dialect]
# Tools and calls as the model's chat template writes them.
name = "template"

[rollout.engine]
# "cpu" runs it without a GPU, for tiny models.
device = "cuda"
# Turns that are sampled concurrently; more take more memory.
max_num_seqs = 32
# The engine's share of the GPU; the learner has the rest.
gpu_memory_utilization = 0.45

[launcher.rollout]
# None of its own: both services use the machine's only GPU.
gpus = 0

[launcher.learner]
# As above.
gpus = 0

[learner]
# Tasks to train on.
tasks = "tasks/train.jsonl"
# Updates of the policy.
steps = 100
# Tasks of a step.
groups_per_step = 8
# Attempts at each of them, which are compared with each other.
group_size = 8

[learner.algorithm]
# How much better than the other attempts at its task an attempt was.
advantage = "grpo"

[learner.lora]
# Adapters are trained, and the model stays as it is.
rank = 16
# Their weight is alpha / rank.
alpha = 32
# Which layers have one.
target_modules = "all-linear"

[learner.optimizer]
# Learning rate.
lr = 1e-5
# Steps in which it rises from 0.
warmup_steps = 5
# The largest norm of a gradient.
grad_clip = 1.0

[learner.rank]
# As that of the engine.
device = "cuda"
# Tokens that are trained on together.
pack_tokens = 16384
# Activations are computed again in the backward pass, which saves memory.
gradient_checkpointing = "full"

[learner.checkpoint]
# Steps between checkpoints.
every = 20

[learner.eval]
# Steps between evaluations.
every = 20

[[learner.eval.sets]]
# Its name in metrics and tables.
name = "heldout"
# Tasks that are never trained on.
tasks = "tasks/heldout.jsonl"
"""
