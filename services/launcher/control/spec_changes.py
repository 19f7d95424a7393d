"""What differs between the spec that a run has and one that it is to go on with. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from services.common.config import SECRET_KEY
from services.common.spec import parse_shared

# Keys that a run which has begun keeps for ever, with what stands on them.
_FIXED = {
    "seed": "the order of its tasks and every draw follow from it",
    "policy.model": "its checkpoints, and what its journal holds, are of this model",
    "policy.revision": "its checkpoints, and what its journal holds, are of this model",
    "policy.dtype": "engine and trainer were held together in it",
    "policy.rope_scaling": "its weights were trained under it",
}
_CRITIC = ("learner.algorithm.advantage", "gae")
_ABSENT = object()
_SHOWN_CHARACTERS = 80


@dataclass(frozen=True, slots=True)
class Change:
    """One key that differs."""

    key: str
    old: Any
    new: Any

    @property
    def fixed(self) -> str:
        """Why a run that has begun cannot take it; empty where it can."""
        if (self.key, self.new) == _CRITIC:
            return "its checkpoints hold no critic"
        found = (why for key, why in _FIXED.items() if f"{self.key}.".startswith(f"{key}."))
        return next(found, "")

    def told(self) -> str:
        text = f"{self.key}: the run has {_shown(self.old)}, the file {_shown(self.new)}"
        if SECRET_KEY.search(self.key):
            text = f"{self.key}: differs"
        return f"{text} (cannot change: {self.fixed})" if self.fixed else text


def changes(stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[Change]:
    """Every key whose value differs, as one types it. Raises ConfigError."""
    return list(_differing(_whole(stored, "the run's own spec"), _whole(wanted, "spec"), ""))


def _whole(spec: Mapping[str, Any], where: str) -> dict[str, Any]:
    """With the defaults of what all services share: what a run keeps for ever is there."""
    return {**spec, **parse_shared(spec, where=where).model_dump(mode="json")}


def _differing(old: Any, new: Any, key: str) -> Iterator[Change]:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        names = dict.fromkeys((*old, *new))
        pairs = [(name, old.get(name, _ABSENT), new.get(name, _ABSENT)) for name in names]
    elif _tables(old) and _tables(new) and len(old) == len(new):
        pairs = [(str(at), *pair) for at, pair in enumerate(zip(old, new, strict=True))]
    else:
        # 1 and 1.0 are one number; true is none.
        if old != new or isinstance(old, bool) is not isinstance(new, bool):
            yield Change(key, old, new)
        return
    for name, before, after in pairs:
        yield from _differing(before, after, f"{key}.{name}" if key else name)


def _tables(value: Any) -> bool:
    return isinstance(value, Sequence) and bool(value) and isinstance(value[0], Mapping)


def _shown(value: Any) -> str:
    if value is _ABSENT:
        return "none"
    text = repr(value)
    return f"{text[:_SHOWN_CHARACTERS]}..." if len(text) > _SHOWN_CHARACTERS else text
