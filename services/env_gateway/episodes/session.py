"""One episode at run time: its instance, its calls in flight and their answers, its grade."""

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import AsyncGenerator, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import partial

from services.common.parsing import aside
from services.env_gateway.episodes.leases import Episode, EpisodeLostError, State
from services.env_gateway.grading.policy_writings import Writings
from services.env_gateway.grading.verdict import Grade
from services.env_gateway.limits.admission import Ticket
from services.env_gateway.ports import Backend, Instance, Media, Part, Text, Tool
from services.env_gateway.tools.computer_tool import Screen

INLINE_BYTES = 64 * 2**10
_INLINE_TOTAL_BYTES = 512 * 2**10


class Outcome(StrEnum):
    OK = "ok"
    TOOL_ERROR = "tool_error"
    BAD_TOOL = "bad_tool"
    BAD_ARGUMENTS = "bad_arguments"
    NOT_EXECUTED = "not_executed"
    OUTCOME_UNKNOWN = "outcome_unknown"
    DEADLINE = "deadline"
    SESSION_LOST = "session_lost"


@dataclass(frozen=True, slots=True)
class Answer:
    """What is told about a tool call. A part whose media has no `data` is fetched by its hash."""

    outcome: Outcome
    parts: tuple[Part, ...] = ()
    reward: float | None = None
    done: bool = False
    attempts: int = 0
    queue_s: float = 0.0
    upstream_s: float = 0.0


class Signal:
    """Wakes everyone who waits at the moment of `notify`."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify(self) -> None:
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self) -> None:
        await self._event.wait()


class MediaStore:
    """Large parts of one episode by hash, the oldest dropped beyond `max_bytes`."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._size = 0
        self._media: OrderedDict[bytes, Media] = OrderedDict()

    def get(self, sha256: bytes) -> Media | None:
        return self._media.get(sha256)

    async def keep(
        self, parts: tuple[Part, ...], inline_total: int = _INLINE_TOTAL_BYTES
    ) -> tuple[Part, ...]:
        """Store what is too large to inline, and return the parts as they go on the wire.

        A large text becomes media of type text/plain, so that no answer outgrows a message.
        """
        # Media have their hashes already.
        size = sum(len(part.text) for part in parts if isinstance(part, Text))
        sent = await aside(size, lambda: _parted(parts, inline_total))
        return tuple([self._store(part) if isinstance(part, _Large) else part for part in sent])

    def _store(self, large: "_Large") -> Media:
        media = large.media
        if media.sha256 not in self._media:
            self._media[media.sha256] = media
            self._size += media.size
        while self._size > self._max_bytes and len(self._media) > 1:
            _, dropped = self._media.popitem(last=False)
            self._size -= dropped.size
        return media.without_data()


@dataclass(frozen=True, slots=True)
class _Large:
    """A part that is stored, and fetched by its hash."""

    media: Media


def _parted(parts: Iterable[Part], inline_total: int) -> "list[Part | _Large]":
    """Each part as it can be sent, or told apart as too large for that."""
    inlined = 0
    result: list[Part | _Large] = []
    for part in map(_sendable, parts):
        size = len(part.data) if isinstance(part, Media) else len(part.text.encode())
        if size <= INLINE_BYTES and inlined + size <= inline_total:
            inlined += size
            result.append(part)
        else:
            result.append(_Large(part if isinstance(part, Media) else as_media(part)))
    return result


def as_media(text: Text) -> Media:
    data = text.text.encode()
    return Media(data, "text/plain; charset=utf-8", hashlib.sha256(data).digest(), len(data))


def _sendable(part: Part) -> Part:
    """Environments may say lone surrogates, which no encoding has."""
    if isinstance(part, Media) or part.text.isascii():
        return part
    return Text(part.text.encode("utf-8", "replace").decode())


class Session:
    """`failure` is set when the environment could not be had, `trouble` while the last attempt has
    failed and another follows. `opener` ends when the episode is ready or cannot become so."""

    def __init__(
        self, episode: Episode, *, backend: Backend, backend_name: str, ticket: Ticket, media: int
    ) -> None:
        self.episode = episode
        self.backend = backend
        self.backend_name = backend_name
        self.ticket = ticket
        self.instance: Instance | None = None
        self.journaled = False
        # Whether a creation may have been executed, so that there is something to delete.
        self.may_exist = False
        self.tools: Mapping[str, Tool] = {}
        self.first_observation: tuple[Part, ...] = ()
        self.final_answer: str | None = None
        self.writings = Writings()
        self.screen: Screen | None = None
        self.failure: str | None = None
        self.trouble = ""
        self.open_s = 0.0
        # When the episode entered the state that it is in.
        self.state_since = episode.opened_at
        self.changed = Signal()
        self.opener: asyncio.Task[None] | None = None
        self.watchers = 0
        self.turn = asyncio.Semaphore(1)
        # Failures in a row to reach the instance.
        self.unreachable = 0
        self.answers: dict[int, asyncio.Task[Answer]] = {}
        self.media = MediaStore(media)
        self.grading: asyncio.Task[Grade] | None = None

    @property
    def env_key(self) -> str:
        return self.episode.spec.task.env_key

    @property
    def run_id(self) -> str:
        return self.episode.spec.run_id

    async def note(self, parts: Iterable[Part]) -> None:
        """Note what the policy is shown."""
        for part in parts:
            if isinstance(part, Text):
                await aside(len(part.text), partial(self.writings.showed, part.text))

    def known_grade(self) -> Grade | None:
        task = self.grading
        if task is None or not task.done() or task.cancelled() or task.exception() is not None:
            return None
        grade = task.result()
        return grade if grade.known else None

    async def states(self) -> AsyncGenerator[State]:
        """Each state as it is entered, and again with each new trouble, up to READY or FAILED.
        Raises EpisodeLostError."""
        seen: tuple[State, str] | None = None
        while True:
            if self.failure is not None:
                yield State.FAILED
                return
            state = self.episode.state
            if state is State.CLOSED:
                raise EpisodeLostError(f"episode {self.episode.episode_id} {self.episode.detail}")
            if (state, self.trouble) == seen:
                await self.changed.wait()
                continue
            seen = (state, self.trouble)
            yield state
            if state is State.READY:
                return

    def cancel_work(self) -> None:
        """Stop calls and grading; whoever waits for them learns that the episode is lost."""
        for task in self.answers.values():
            task.cancel()
        if self.grading is not None:
            self.grading.cancel()
        self.changed.notify()
