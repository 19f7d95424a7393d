"""Prompts: plain sentences about what calls bring about. Pure.

A prompt has words of identifiers, and values in quotes. Nothing of a tool's description stands in
it, and no value that a prompt, a template or a terminal would read otherwise (`values.py`)."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

from flotilla_reading.own_tools.values import PATH, TEXT, kind_of, split_name
from flotilla_reading.play.solutions import SolutionCall

_MAKE, _MOVE = ("write", "create", "save", "add", "make", "new"), ("move", "rename")
_DROP = ("delete", "remove")
_FOLDER = ("directory", "folder", "dir")
_INSERT = re.compile(r"INSERT INTO (\w+) \((.*)\) VALUES \((.*)\)")
_UPDATE = re.compile(r"UPDATE (\w+) SET (\w+) = (.*) WHERE (\w+) = (.*)")
_DELETE = re.compile(r"DELETE FROM (\w+) WHERE (\w+) = (.*)")
_CREATE = re.compile(r"CREATE TABLE (\w+) \((.*)\)")


def write_prompt(calls: Sequence[SolutionCall], prefix: str = "") -> str:
    """Return what is asked for by these calls, a sentence for each, in their order. `prefix` is the
    first word of the names of all tools, if they have one in common."""
    sentences = [describe_call(each, prefix) for each in calls]
    return " Then ".join(
        sentence if number == 0 else sentence[0].lower() + sentence[1:]
        for number, sentence in enumerate(sentences)
    )


def describe_call(call: SolutionCall, prefix: str = "") -> str:
    """Return a sentence that demands what a call does, with all values of its arguments."""
    words = split_name(call.name)
    if prefix and len(words) > 1 and words[0] == prefix:
        words = words[1:]
    given = call.arguments
    return _of_files(words, given) or _of_statement(given) or _of_anything(words, given)


def _of_files(words: Sequence[str], given: Mapping[str, Any]) -> str:
    """Return the sentence about a tool for files or folders; "" for any other."""
    if not words or not all(isinstance(value, str) for value in given.values()):
        return ""
    kinds = {name: kind_of(name) for name in given}
    paths = [given[name] for name in given if kinds[name] == PATH]
    texts = [given[name] for name in given if kinds[name] == TEXT]
    if len(paths) + len(texts) != len(given):
        return ""
    verb, is_folder = words[0], any(word in _FOLDER for word in words)
    if verb in _MAKE and len(paths) == len(texts) == 1:
        return f"Write {_quote(texts[0])} into the file {paths[0]}."
    if verb in _MAKE and is_folder and len(paths) == 1 and not texts:
        return f"Create the folder {paths[0]}."
    if verb in _MOVE and len(paths) == 2 and not texts:
        return f"Move {paths[0]} to {paths[1]}."
    if verb in _DROP and len(paths) == 1 and not texts:
        return f"Delete {paths[0]}."
    return ""


def _of_statement(given: Mapping[str, Any]) -> str:
    """Return the sentence about a change of a database; "" for anything else."""
    (statement, *others) = [*given.values(), None, None][:2]
    if not isinstance(statement, str) or others != [None]:
        return ""
    if found := _INSERT.fullmatch(statement):
        pairs = zip(found[2].split(", "), found[3].split(", "), strict=False)
        return f"Add to {found[1]}: {', '.join(f'{name} {value}' for name, value in pairs)}."
    if found := _UPDATE.fullmatch(statement):
        return f"In {found[1]}, set {found[2]} to {found[3]} where {found[4]} is {found[5]}."
    if found := _DELETE.fullmatch(statement):
        return f"Delete from {found[1]} what has {found[2]} {found[3]}."
    if found := _CREATE.fullmatch(statement):
        return f"Create the table {found[1]} with the columns {found[2]}."
    return ""


def _of_anything(words: Sequence[str], given: Mapping[str, Any]) -> str:
    verb, *rest = words or ["call"]
    what = f"{verb.capitalize()} {' '.join(rest)}".strip()
    if rest and not rest[-1].endswith("s"):
        article = "an" if rest[0][0] in "aeiou" else "a"
        what = f"{verb.capitalize()} {article} {' '.join(rest)}"
    if len(given) == 1 and set(split_name(next(iter(given)))) & {*rest, *(f"{w}s" for w in rest)}:
        # "Delete entities: ..." needs no "with entity names".
        return f"{what}: {_tell_value(next(iter(given.values())))}."
    told = _tell(given)
    return f"{what} with {told}." if told else f"{what}."


def _tell(given: Mapping[str, Any]) -> str:
    parts = [f"{' '.join(split_name(name))} {_tell_value(value)}" for name, value in given.items()]
    return ", ".join(parts[:-1]) + (" and " if len(parts) > 1 else "") + parts[-1] if parts else ""


def _tell_value(value: Any) -> str:
    if isinstance(value, dict):
        return f"({_tell(cast('dict[str, Any]', value))})"
    if isinstance(value, list):
        return " and ".join(_tell_value(each) for each in cast("list[Any]", value)) or "nothing"
    return _quote(value) if isinstance(value, str) else json.dumps(value)


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
