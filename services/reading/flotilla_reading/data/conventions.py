"""Rows in the conventions of others, made into tasks: verl, SkyRL, TRL and Harbor, and what Fleet's
API sends. A row that cannot be one says why. Pure.

A task is sent to environments, and its variables are shown to the policy. So what a row has besides
what a task has a place for becomes `metadata`, which neither gets: answers are often among it."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, cast

from flotilla_common.domain.task_fields import TASK_FIELDS
from flotilla_common.tasks.task_files import TaskRow, find_fault, read_row
from flotilla_common.tasks.task_format import SINGLE_TURN

# The environment of questions whose verifier knows the answer: it has neither tools nor data.
QUESTIONS = "questions"
# Environments of SkyRL that grade one answer by comparison with the expected one.
_SKYRL_QUESTIONS = ("gsm8k", "aime")
_FLEET_ENV = "fleet_task"
# Fleet's answer in place of a verifier that it could not read.
_NO_CODE = "<error loading code:"
_SENT_BY_FLEET = ("key", "prompt", "version", "data_id", "data_version", "env_variables")
# Fields that Fleet may send in the metadata.
_IN_METADATA = ("task_modality", "difficulty")
_PICTURES = ("images", "videos", "multi_modal_data")

Fields = Mapping[str, Any]


class RowError(ValueError):
    """A row cannot be a task of ours; the message gives the reason and what to do."""


@dataclass(frozen=True, slots=True)
class Defaults:
    """The environment of rows that name none, and the modality of tasks of Fleet that name none."""

    env: str = ""
    modality: str = ""


NO_DEFAULTS = Defaults()


@dataclass(frozen=True, slots=True)
class Convention:
    """Someone's way to write a task as a row. `convert` makes our fields of it, or raises
    RowError."""

    name: str
    fits: Callable[[Fields], bool]
    convert: Callable[[Fields, Defaults], dict[str, Any]]


def choose_convention(first: Any) -> Convention | None:
    """Return the convention of a file by its first entry; None for Fleet's own."""
    if not isinstance(first, dict):
        return None
    fields = cast("Fields", first)
    return next((each for each in _CONVENTIONS if each.fits(fields)), None)


def to_row(convention: Convention | None, place: str, value: Any, defaults: Defaults) -> TaskRow:
    """Return an entry of a file as a row, with its task or what is wrong with it."""
    if convention is None or find_fault(value):
        return read_row(place, value)
    fields = cast("Fields", value)
    try:
        return read_row(place, convention.convert(fields, defaults))
    except RowError as error:
        named = {"key": _key_of(fields), **fields}
        return TaskRow(place, named, "", None, f"{convention.name}: {error}")


def _from_verl(fields: Fields, defaults: Defaults) -> dict[str, Any]:
    rule = _object_in(fields, "reward_model")
    if rule.get("style") != "rule":
        raise RowError(
            f"reward_model.style is {rule.get('style')!r}, so a model of verl's grades it; only"
            " rows with style 'rule' can be graded by their ground_truth"
        )
    if fields.get("ability") != "math":
        raise RowError(
            f"ability {fields.get('ability')!r} is graded by verl's own function for data_source"
            f" {fields.get('data_source')!r}; write tasks with a verifier"
        )
    if _object_in(fields, "extra_info").get("need_tools_kwargs"):
        raise RowError("it needs tools of verl's; offer them by MCP, and write tasks for them")
    about = {name: value for name, value in fields.items() if name != "prompt"}
    return _make_question(fields, rule, about)


def _from_skyrl(fields: Fields, defaults: Defaults) -> dict[str, Any]:
    env = fields["env_class"]
    if env in _SKYRL_QUESTIONS:
        rule = _object_in(fields, "reward_spec")
        if rule.get("method") != "rule":
            raise RowError(f"reward_spec.method is {rule.get('method')!r}; only 'rule' is read")
        about = {name: value for name, value in fields.items() if name != "prompt"}
        return _make_question(fields, rule, about)
    if env == _FLEET_ENV and not fields.get("verifier_code"):
        raise RowError(
            "a row of Fleet's `prepare_dataset` has no verifier: prepare the task file that it was"
            " made from"
        )
    env = fields.get("data_source") if env == _FLEET_ENV else env
    return _make_task(fields, env, ("prompt", "env_class"))


def _from_trl(fields: Fields, defaults: Defaults) -> dict[str, Any]:
    env = fields.get("environment") or defaults.env
    if not env:
        raise RowError(
            "it names no environment, and TRL's reward functions are not part of the data; name"
            " an environment that grades it by --default-env"
        )
    task = _make_task(fields, env, ("prompt", "environment", "tools"))
    if tools := fields.get("tools"):
        task["offered_tools"] = _tool_names(tools)
    return task


def _from_harbor(fields: Fields, defaults: Defaults) -> dict[str, Any]:
    if not defaults.env:
        raise RowError(
            "its container and tests/test.sh are run by no backend of the env_gateway; serve it by"
            " OpenEnv, which grades it itself, and name that environment by --default-env"
        )
    config = _object_in(fields, "task_toml")
    difficulty = _object_in(config, "metadata").get("difficulty")
    return {
        "key": _object_in(config, "task").get("name") or _key_of(fields),
        "prompt": fields["instruction"],
        "env_id": defaults.env,
        "data_id": fields["folder"],
        "metadata": config,
        **({} if difficulty is None else {"difficulty": difficulty}),
    }


def _from_fleet(fields: Fields, defaults: Defaults) -> dict[str, Any]:
    code = _object_in(fields, "verifier").get("code") or fields.get("verifier_func")
    if not isinstance(code, str) or not code.strip() or code.strip().startswith(_NO_CODE):
        raise RowError("it has no verifier that can be read")
    metadata = _object_in(fields, "metadata")
    task = {name: fields[name] for name in _SENT_BY_FLEET if fields.get(name) is not None}
    task |= {
        name: value
        for name in _IN_METADATA
        if (value := fields.get(name) or metadata.get(name)) is not None
    }
    if defaults.modality:
        task.setdefault("task_modality", defaults.modality)
    return {**task, "env_id": fields["environment_id"], "verifier_func": code}


_CONVENTIONS = (
    Convention(
        "Fleet's API",
        lambda row: "environment_id" in row and not {"env_id", "env_key"} & row.keys(),
        _from_fleet,
    ),
    Convention("Harbor", lambda row: {"task_toml", "instruction"} <= row.keys(), _from_harbor),
    Convention("SkyRL", lambda row: {"prompt", "env_class"} <= row.keys(), _from_skyrl),
    Convention(
        "verl", lambda row: {"prompt", "data_source", "reward_model"} <= row.keys(), _from_verl
    ),
    Convention(
        "TRL",
        lambda row: "environment" in row or isinstance(row.get("prompt"), list),
        _from_trl,
    ),
)


def _make_question(fields: Fields, rule: Fields, about: Fields) -> dict[str, Any]:
    """Return a task whose only turn is the answer; its verifier has the right one."""
    truth = rule.get("ground_truth")
    if isinstance(truth, bool) or not isinstance(truth, str | int | float) or not str(truth):
        raise RowError(
            f"ground_truth is {type(truth).__name__}; a text or a number can be compared with an"
            " answer, and nothing else"
        )
    return {
        "key": _key_of(fields),
        "prompt": _prompt_of(fields),
        "env_id": QUESTIONS,
        "task_modality": SINGLE_TURN,
        "verifier_func": _verifier_source().replace(
            'EXPECTED = ""', f"EXPECTED = {str(truth)!r}", 1
        ),
        "metadata": about,
    }


def _make_task(fields: Fields, env: Any, used: Sequence[str]) -> dict[str, Any]:
    """Return a task of an environment, with the fields that a task has; others are metadata."""
    own = {name: value for name, value in fields.items() if name in TASK_FIELDS - {*used}}
    metadata = own.pop("metadata", None)
    rest = {
        name: value
        for name, value in fields.items()
        if name not in TASK_FIELDS and name not in used
    }
    rest |= {} if metadata is None else {"metadata": metadata}
    named = "key" in own or "task_key" in own
    return {
        **({} if named else {"key": _key_of(fields)}),
        **own,
        "prompt": _prompt_of(fields),
        "env_id": env,
        **({"metadata": rest} if rest else {}),
    }


@cache
def _verifier_source() -> str:
    return Path(__file__).with_name("question_verifier.py").read_text(encoding="utf-8")


def _key_of(fields: Fields) -> str:
    """Return a key by the source's own name or number; without one, by the content."""
    if "folder" in fields:
        return str(fields["folder"])
    source = str(fields.get("data_source") or fields.get("env_class") or "row")
    extra = _object_in(fields, "extra_info")
    if extra.get("index") is not None:
        split = str(extra.get("split") or "all")
        return f"{source}-{split}-{extra['index']}"
    content = json.dumps(fields, sort_keys=True)
    return f"{source}-{hashlib.sha256(content.encode()).hexdigest()[:16]}"


def _prompt_of(fields: Fields) -> str:
    """Return the text of a prompt: the messages of system and user, a blank line between them."""
    if shown := next((name for name in _PICTURES if fields.get(name)), None):
        raise RowError(f"its prompt shows {shown}, and a task has text only")
    prompt = fields.get("prompt")
    if isinstance(prompt, str):
        return prompt
    messages = cast("list[Any]", prompt) if isinstance(prompt, list) else []
    texts: list[str] = []
    for message in messages:
        about = cast("Fields", message) if isinstance(message, dict) else {}
        role, content = about.get("role"), about.get("content")
        if role not in ("system", "user"):
            raise RowError(f"its prompt has a message of {role!r}; a task begins with the user")
        if not isinstance(content, str):
            raise RowError("its prompt has a message that is not text")
        texts.append(content)
    return "\n\n".join(texts)


def _tool_names(tools: Any) -> list[str]:
    """Return the names of tools, which are written as names or as schemas."""
    names: list[str] = []
    for tool in cast("list[Any]", tools) if isinstance(tools, list) else [tools]:
        about = cast("Fields", tool) if isinstance(tool, dict) else {"name": tool}
        name = _object_in(about, "function").get("name") or about.get("name")
        if not isinstance(name, str):
            raise RowError("tools must be a list of names or of schemas")
        names.append(name)
    return names


def _object_in(fields: Fields, name: str) -> Fields:
    value = fields.get(name)
    return cast("Fields", value) if isinstance(value, dict) else {}
