"""Changes of an environment's tools from one episode to the next. Pure."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from flotilla_common.aio.bounded_dict import BoundedDict
from flotilla_common.tasks.task_format import Task
from flotilla_env_gateway.ports import Tool

TOOLS_CHANGED, VERSION_CHANGED = "tools_changed", "version_changed"
# Tools named in an event, and characters of each name.
_NAMED, _NAME_CHARACTERS = 40, 100
_SCOPES, _TASKS, _TOLD = 64, 1024, 64


@dataclass(frozen=True, slots=True)
class Listing:
    """Digests of the tools that an environment listed: of all of them, and of each by its name.
    Neither depends on an order of tools or of keys, which servers shuffle."""

    digest: bytes
    by_name: Mapping[str, bytes] = field(compare=False)


@dataclass(frozen=True, slots=True)
class ToolDifference:
    """Names of the tools that differ between two listings, in alphabetical order."""

    added: Sequence[str]
    removed: Sequence[str]
    changed: Sequence[str]

    def to_fields(self) -> dict[str, list[str]]:
        """Return the names for a log line, long ones and long lists cut."""
        kinds = {"added": self.added, "removed": self.removed, "changed": self.changed}
        return {kind: _cut_names(names) for kind, names in kinds.items()}

    def __str__(self) -> str:
        named = self.to_fields().items()
        return "; ".join(f"{kind} {', '.join(names)}" for kind, names in named if names)


@dataclass(frozen=True, slots=True)
class EnvironmentChange:
    """What an episode met that others of its environment did not: another version, which may have
    other tools, or other tools of the same version."""

    version: str
    version_before: str
    difference: ToolDifference

    @property
    def rule(self) -> str:
        return TOOLS_CHANGED if self.version == self.version_before else VERSION_CHANGED

    def __str__(self) -> str:
        tools = f"its tools changed: {self.difference}" if str(self.difference) else ""
        if self.rule == TOOLS_CHANGED:
            return f"under version {self.version!r} {tools}"
        versions = f"its version changed from {self.version_before!r} to {self.version!r}"
        return f"{versions}, and {tools}" if tools else versions


class ToolHistory:
    """Compares the tools of each new episode with those of the episodes before it that should have
    the same: of the same environment, pinned version, modality and servers.

    A task is compared with its own last episode. One that is new is compared with the newest
    episode of another task, unless the tools are known to depend on the task: one task kept its
    own while another one had others."""

    def __init__(self) -> None:
        self._scopes: BoundedDict[tuple[object, ...], _Scope] = BoundedDict(_SCOPES)

    def note_listed(
        self, task: Task, version: str, tools: Sequence[Tool]
    ) -> tuple[Listing, EnvironmentChange | None]:
        """Return the digests of an episode's tools, and a change that has not been told yet."""
        key = (task.env_key, task.env_version, task.modality, task.servers)
        scope = self._scopes[key] = self._scopes.get(key) or _Scope()
        listing = scope.digest_tools(tools)
        before, seen = scope.replace_seen(task.key, (version, listing))
        if before == seen or (before, seen) in scope.told:
            return listing, None
        scope.told[before, seen] = None
        difference = compare_listings(before[1], listing)
        return listing, EnvironmentChange(version, before[0], difference)


# A version and its tools.
_Seen = tuple[str, Listing]


class _Scope:
    """Episodes that should have the same tools."""

    def __init__(self) -> None:
        self.told: BoundedDict[tuple[_Seen, _Seen], None] = BoundedDict(_TOLD)
        # The newest tools as they were listed: most episodes list the same, which need no digest.
        self._tools: Sequence[Tool] = ()
        self._listing: Listing | None = None
        self._newest: _Seen | None = None
        self._by_task: BoundedDict[str, _Seen] = BoundedDict(_TASKS)
        self._varies_by_task = False

    def digest_tools(self, tools: Sequence[Tool]) -> Listing:
        if self._listing is None or tools != self._tools:
            self._tools, self._listing = tools, digest_tools(tools)
        return self._listing

    def replace_seen(self, task_key: str, seen: _Seen) -> tuple[_Seen, _Seen]:
        """Return what an episode is compared with, and what it saw; remember the latter."""
        own, newest = self._by_task.get(task_key), self._newest
        if own is not None:
            self._varies_by_task = own == seen and (self._varies_by_task or newest != seen)
        self._by_task[task_key] = self._newest = seen
        before = own or (None if self._varies_by_task else newest)
        return before or seen, seen


def digest_tools(tools: Sequence[Tool]) -> Listing:
    by_name = {tool.name: _digest_tool(tool) for tool in tools}
    whole = hashlib.blake2b(digest_size=16)
    for _, digest in sorted(by_name.items()):
        whole.update(digest)
    return Listing(whole.digest(), by_name)


def compare_listings(before: Listing, after: Listing) -> ToolDifference:
    old, new = before.by_name, after.by_name
    return ToolDifference(
        sorted(new.keys() - old.keys()),
        sorted(old.keys() - new.keys()),
        sorted(name for name in old.keys() & new.keys() if old[name] != new[name]),
    )


def _digest_tool(tool: Tool) -> bytes:
    schema = json.loads(tool.input_schema_json)
    told = [tool.name, tool.description, schema, tool.read_only, tool.idempotent, tool.parallel]
    text = json.dumps(told, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def _cut_names(names: Sequence[str]) -> list[str]:
    more = [f"and {len(names) - _NAMED} others"] if len(names) > _NAMED else []
    return [name[:_NAME_CHARACTERS] for name in names[:_NAMED]] + more
