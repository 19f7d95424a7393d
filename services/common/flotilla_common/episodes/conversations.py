"""Conversations to imitate, in messages: what a reader of files hands to the rollout's dialect,
which renders them (`python -m flotilla_rollout.rendering`).

They travel as JSON lines: one of `RenderSettings`, the conversations, and one of `RenderEnd`. An
input that breaks off before its end makes no file."""

from collections.abc import Mapping
from typing import Any

import msgspec

# Outcomes of answers to no call: to a turn without one, and to one that could not be read.
NO_CALL, PARSE_ERROR = "no_call", "parse_error"


class SaidCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A call of a tool; `arguments` are a JSON object."""

    name: str
    arguments: str


class SaidReply(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tool's answer as its environment gave it. `outcome` is a kind of error, "" if it is none;
    one of PARSE_ERROR answers a call that could not be read, and of NO_CALL a turn without one."""

    text: str
    outcome: str = ""


class SaidTurn(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A turn of the assistant, and what follows it: an answer to each call, in their order, and
    what the user says. Nothing follows the last.

    `trained` is False for a turn that is only read."""

    content: str = ""
    thinking: str = ""
    calls: tuple[SaidCall, ...] = ()
    replies: tuple[SaidReply, ...] = ()
    user: str = ""
    trained: bool = True


class Conversation(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="conversation"):
    """One conversation. `source` and `key` (group, attempt, try) say where it is from, and `tools`
    are in the form of OpenAI's API. `system` is "" without a system message."""

    source: str
    key: tuple[str, int, int]
    task_key: str
    reward: float
    system: str
    prompt: str
    turns: tuple[SaidTurn, ...]
    tools: tuple[dict[str, Any], ...] = ()


class RenderSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="settings"):
    """The tables `policy` and `rollout.dialect` of a spec, and the file to write."""

    policy: dict[str, Any]
    dialect: dict[str, Any]
    out: str


class RenderEnd(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="end"):
    """What the reader says of all conversations, as `DemonstrationHead` has it."""

    source: str
    selection: Mapping[str, Any]
    counts: Mapping[str, int]
    pruned: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()


RenderLine = RenderSettings | Conversation | RenderEnd
