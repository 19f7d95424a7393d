"""Runtime state of one episode: its instance, its calls in flight and their answers, its
grade."""

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Iterable, Mapping
from dataclasses import dataclass

from flotilla_common.aio.bounded_bytes import BoundedBytes
from flotilla_common.aio.change_signal import ChangeSignal
from flotilla_common.domain.attempts import Grade, NoGradeReason
from flotilla_common.telemetry.log import get_logger
from flotilla_common.text.parsing import run_aside
from flotilla_env_gateway.episodes.episode_book import Episode, EpisodeLostError, EpisodeState
from flotilla_env_gateway.episodes.turn_line import TurnLine, TurnPlace
from flotilla_env_gateway.grading.passed_text import PassedText
from flotilla_env_gateway.limits.episode_admission import Ticket
from flotilla_env_gateway.ports import (
    Backend,
    CallAnswer,
    EpisodeRecord,
    Instance,
    Media,
    Part,
    Text,
    Tool,
)
from flotilla_env_gateway.tools.computer_tool import Screen
from flotilla_env_gateway.tools.tool_drift import Listing

_LOG = get_logger(__name__)
INLINE_BYTES = 64 * 2**10
_INLINE_TOTAL_BYTES = 512 * 2**10


class MediaStore:
    """Large parts of one episode by hash, those used last of `max_bytes`."""

    def __init__(self, max_bytes: int) -> None:
        self._media: BoundedBytes[bytes, Media] = BoundedBytes(max_bytes, lambda media: media.size)

    def get_media(self, sha256: bytes) -> Media | None:
        return self._media.get(sha256)

    async def store_large_parts(
        self, parts: tuple[Part, ...], inline_total: int = _INLINE_TOTAL_BYTES
    ) -> tuple[Part, ...]:
        """Store parts that are too large to inline, and return the parts for the wire.

        A large text becomes media of type text/plain, so that no answer outgrows a message.
        """
        # Media already have their hashes.
        size = sum(len(part.text) for part in parts if isinstance(part, Text))
        sent = await run_aside(size, lambda: _parted(parts, inline_total))
        return tuple(
            [self._store_media(part) if isinstance(part, _Large) else part for part in sent]
        )

    def _store_media(self, large: "_Large") -> Media:
        self._media.keep(large.media.sha256, large.media)
        return large.media.without_data()


@dataclass(frozen=True, slots=True)
class _Large:
    """A stored part, fetched by its hash."""

    media: Media


def _parted(parts: Iterable[Part], inline_total: int) -> "list[Part | _Large]":
    """Return each part as it can be sent, or marked as too large."""
    inlined = 0
    result: list[Part | _Large] = []
    for part in map(_replace_surrogates, parts):
        size = len(part.data) if isinstance(part, Media) else len(part.text.encode())
        if size <= INLINE_BYTES and inlined + size <= inline_total:
            inlined += size
            result.append(part)
        else:
            result.append(_Large(part if isinstance(part, Media) else text_to_media(part)))
    return result


def text_to_media(text: Text) -> Media:
    data = text.text.encode()
    return Media(data, "text/plain; charset=utf-8", hashlib.sha256(data).digest(), len(data))


def _replace_surrogates(part: Part) -> Part:
    """Replace lone surrogates, which environments may send and no encoding can represent."""
    if isinstance(part, Media) or part.text.isascii():
        return part
    return Text(part.text.encode("utf-8", "replace").decode())


class Session:
    """One open episode. `failure` is set if its environment could not be opened. `trouble` is
    the error of the last failed attempt while a retry is pending. `opener` ends when the
    episode is READY or cannot become so."""

    def __init__(
        self, episode: Episode, *, backend: Backend, backend_name: str, ticket: Ticket, media: int
    ) -> None:
        self.episode = episode
        self.backend = backend
        self.backend_name = backend_name
        self.ticket = ticket
        self.instance: Instance | None = None
        self.journaled = False
        # True once a creation may have been executed, so that there may be an instance to delete.
        self.may_exist = False
        self.tools: Mapping[str, Tool] = {}
        # Of all tools that the instance listed as it opened, and the names that it lists no more.
        self.listing: Listing | None = None
        self.vanished: frozenset[str] = frozenset()
        # The instance says that its tools changed; they are listed again.
        self.announced = False
        self.listing_again: asyncio.Task[None] | None = None
        # Names of read-only tools, offered or not.
        self.readable: frozenset[str] = frozenset()
        self.first_observation: tuple[Part, ...] = ()
        self.final_answer: str | None = None
        self.passed_text = PassedText()
        self.screen: Screen | None = None
        self.failure: str | None = None
        # With a failure, why no further try can be graded either.
        self.no_grade: NoGradeReason | None = None
        # The failure is a refusal of what the task says.
        self.task_fault = False
        self.record = EpisodeRecord()
        self.trouble = ""
        self.open_s = 0.0
        # When the episode entered its current state.
        self.state_since = episode.opened_at
        self.changed = ChangeSignal()
        self.opener: asyncio.Task[None] | None = None
        self.watchers = 0
        self.line = TurnLine()
        # Places of calls that arrived before their predecessors.
        self.early: dict[int, TurnPlace] = {}
        # Consecutive failures to reach the instance.
        self.unreachable = 0
        self.answers: dict[int, asyncio.Task[CallAnswer]] = {}
        self.media = MediaStore(media)
        self.grading: asyncio.Task[Grade] | None = None

    @property
    def env_key(self) -> str:
        return self.episode.spec.task.env_key

    @property
    def run_id(self) -> str:
        return self.episode.spec.run_id

    def join_line(self, call_seq: int, *, shared: bool) -> TurnPlace:
        """Return a registered call's place. It joins the line once all calls before it have
        arrived, together with the calls that waited for this one."""
        place = self.early[call_seq] = TurnPlace(shared=shared)
        for seq in sorted(self.early):
            if seq < self.episode.next_seq:
                self.line.enter_line(self.early.pop(seq))
        return place

    def mark_lost(self, why: str) -> None:
        """Mark the episode as lost: it will have no grade."""
        if not self.episode.lost:
            self.episode.lost = True
            _LOG.warning("episode_lost", episode_id=self.episode.episode_id, why=why)

    def known_grade(self) -> Grade | None:
        task = self.grading
        if task is None or not task.done() or task.cancelled() or task.exception() is not None:
            return None
        grade = task.result()
        return grade if grade.is_known or grade.to_be_judged else None

    async def follow_states(self) -> AsyncGenerator[EpisodeState]:
        """Yield each state on entry, and again with each new trouble, up to READY or FAILED.
        Raises EpisodeLostError."""
        seen: tuple[EpisodeState, str] | None = None
        while True:
            if self.failure is not None:
                yield EpisodeState.FAILED
                return
            state = self.episode.state
            if state is EpisodeState.CLOSED:
                raise EpisodeLostError(f"episode {self.episode.episode_id} {self.episode.detail}")
            if (state, self.trouble) == seen:
                await self.changed.next_change.wait()
                continue
            seen = (state, self.trouble)
            yield state
            if state is EpisodeState.READY:
                return

    def cancel_work(self) -> None:
        """Cancel calls and grading; their waiters get EpisodeLostError."""
        for task in (*self.answers.values(), self.grading, self.listing_again):
            if task is not None:
                task.cancel()
        self.changed.notify_all()
