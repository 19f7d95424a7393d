"""Comparison of two episodes of one task in which the policy did nothing. Pure."""

import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flotilla_launcher.config.backend_tables import backend_tables

# Values that differ between episodes that share nothing: times, random ids, folders.
_VOLATILE = re.compile(
    r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d(?::\d\d)?(?:\.\d+)?(?:Z|[+-]\d\d:?\d\d)?"
    r"|\b\d\d:\d\d:\d\d\b"
    r"|\b1\d{9}(?:\d{3}){0,3}(?:\.\d+)?\b"
    r"|\b[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b"
    r"|\b(?=\w*\d)[0-9a-fA-F]{12,}\b"
    rf"|{re.escape(tempfile.gettempdir())}/[\w./-]+"
)
_CONTEXT = 30
_SHOWN = 80


@dataclass(frozen=True, slots=True)
class IdleView:
    """What an episode shows to a policy that does nothing: its `tools`, each as text, the text of
    its first observation, the results of tools that only read, and the reward. `own_words` name
    the episode itself."""

    tools: Mapping[str, str]
    first_observation: str
    read_results: Mapping[str, str]
    reward: float
    own_words: Sequence[str] = ()


def describe_difference(first: IdleView, second: IdleView) -> str:
    """Describe how the second episode differs from the first; "" if it does not."""
    return "; ".join(_list_differences(first, second))


def _list_differences(first: IdleView, second: IdleView) -> Iterator[str]:
    if changed := _changed_keys(first.tools, second.tools, first, second):
        yield f"the tools {', '.join(changed)} differ"
    shown = _mask_view(first.first_observation, first), _mask_view(second.first_observation, second)
    if shown[0] != shown[1]:
        yield f"the first observation was {_quote_change(*shown)}"
    # A result that is known of one episode only says nothing.
    both = first.read_results.keys() & second.read_results.keys()
    for name in sorted(both):
        results = (
            _mask_view(first.read_results[name], first),
            _mask_view(second.read_results[name], second),
        )
        if results[0] != results[1]:
            yield f"{name} answered {_quote_change(*results)}"
    if first.reward != second.reward:
        yield f"doing nothing earned {first.reward:g}, then {second.reward:g}"


def _changed_keys(
    old: Mapping[str, str], new: Mapping[str, str], first: IdleView, second: IdleView
) -> list[str]:
    return [
        name
        for name in sorted(old.keys() | new.keys())
        if name not in old
        or name not in new
        or _mask_view(old[name], first) != _mask_view(new[name], second)
    ]


def _mask_view(text: str, view: IdleView) -> str:
    for word in filter(None, view.own_words):
        text = text.replace(word, "*")
    return _VOLATILE.sub("*", text)


def _quote_change(old: str, new: str) -> str:
    """Quote both texts from shortly before their first difference."""
    pairs = enumerate(zip(old, new, strict=False))
    at = next((n for n, (a, b) in pairs if a != b), min(len(old), len(new)))
    start = max(0, at - _CONTEXT)
    return f"{_excerpt(old, start)}, then {_excerpt(new, start)}"


def _excerpt(text: str, start: int) -> str:
    end = start + _SHOWN
    return repr(f"{'...' * (start > 0)}{text[start:end]}{'...' * (end < len(text))}")


def suggest_isolation(section: Mapping[str, Any], backend: str) -> str:
    """Suggest how episodes of a backend get state of their own; `section` is the gateway's."""
    servers = backend_tables(section, backend).values()
    if backend == "openenv":
        return "have `reset` start every session of a task alike, from the seed that it gets"
    if backend != "mcp" or all(server.get("instances") for server in servers):
        return "have every instance start from the task's data, and from nothing else"
    where = "for it in [[env_gateway.servers]]"
    if all(server.get("transport") == "stdio" for server in servers):
        return (
            "its server keeps state outside the episode's folder: have it write below its working"
            f" directory, or, if sharing is meant, set shared_state = true {where}"
        )
    return (
        "all episodes use one server: have it keep state by session, or give every episode a"
        ' process (transport = "stdio") or an instance (instances = true), or, if sharing is'
        f' meant, set sessions = "stateless" {where}'
    )


def shares_state(section: Mapping[str, Any], backend: str) -> bool:
    """Return whether the spec says that episodes of a backend share one world."""
    tables = backend_tables(section, backend).values()
    return any(each.get("shared_state") is True for each in tables)


def may_differ(section: Mapping[str, Any], backend: str) -> bool:
    """Return whether the spec says that the state of an episode is not its own: it is shared, or it
    does not belong to the session."""
    tables = backend_tables(section, backend).values()
    stateless = any(each.get("sessions") == "stateless" for each in tables)
    return shares_state(section, backend) or stateless
