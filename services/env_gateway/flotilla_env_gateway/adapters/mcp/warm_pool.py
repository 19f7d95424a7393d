"""Servers over stdio that were started ahead of their episodes."""

import asyncio
import os
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Generic, Protocol, TypeVar

from flotilla_common.aio.background_tasks import BackgroundTasks
from flotilla_common.aio.concurrency import cancel_tasks
from flotilla_common.rpc.deadlines import loop_time
from flotilla_common.telemetry.log import get_logger
from flotilla_env_gateway.adapters.process_usage import measure_usage
from flotilla_env_gateway.config.gateway import WarmStartsConfig
from flotilla_env_gateway.limits.backoff import Backoff
from flotilla_env_gateway.ports import BackendError

_LOG = get_logger(__name__)
_FAILED_CAP_S = 60.0
# Episodes open in bursts, which starts would slow down: they begin when nothing was taken for so
# long, or for the longest time.
_QUIET_S, _LONGEST_S = 0.5, 5.0


class WarmEpisode(Protocol):
    """Servers that no episode has yet, in a folder of their own."""

    @property
    def pids(self) -> list[int]:
        """The processes that all others of the servers descend from."""
        ...

    @property
    def is_lost(self) -> bool:
        """True once a server is known to have ended."""
        ...

    @property
    def is_reusable(self) -> bool:
        """True if it can be brought back to its beginning."""
        ...

    async def reset_state(self) -> bool:
        """Bring it back to its beginning; return False if that failed, or is not possible."""
        ...

    async def close(self) -> None: ...


T = TypeVar("T", bound=WarmEpisode)


class WarmPool(Generic[T]):
    """Keeps up to `size` episodes' servers ready, as long as all of them fit in the memory; starts
    no more of them concurrently than there are cores. Reusable ones that an episode has are
    expected back, and not replaced.

    Example: `pool = WarmPool("git", start, config)`, then `await pool.take()`, which is None when
    none is ready, `await pool.give_back(episode)` at the episode's end, and `await
    pool.close()`."""

    def __init__(
        self, name: str, start: Callable[[], Awaitable[T]], config: WarmStartsConfig
    ) -> None:
        """Begin to start servers. `start` raises OSError and BackendError."""
        self.name = name
        self.size = config.size
        self._start = start
        self._config = config
        self._ready: deque[T] = deque()
        self._lent: set[T] = set()
        self._returning = 0
        # The largest memory of an episode's servers that was seen, in bytes.
        self._largest = 0
        self._changed = asyncio.Event()
        self._returned = asyncio.Event()
        self._background = BackgroundTasks()
        self._starts: set[asyncio.Task[None]] = set()
        self._filling = asyncio.create_task(self._keep_filled())
        self._cores = asyncio.Semaphore(len(os.sched_getaffinity(0)))
        self._taken_at = -_QUIET_S
        self._backoff = Backoff(base_s=1 / config.starts_per_s, cap_s=_FAILED_CAP_S)
        self._failed = False
        self._told_of_memory = False

    @property
    def ready(self) -> int:
        return sum(not episode.is_lost for episode in self._ready)

    async def take(self) -> T | None:
        """Take servers that are ready, or are about to be given back; None if there are none."""
        while self._ready or self._returning:
            if not self._ready:
                self._returned.clear()
                await self._returned.wait()
                continue
            episode = self._ready.popleft()
            self._taken_at = loop_time()
            self._changed.set()
            if not episode.is_lost:
                if episode.is_reusable:
                    self._lent.add(episode)
                return episode
            self._background.start_task(episode.close())
        return None

    async def give_back(self, episode: T) -> None:
        """Reset servers for the next episode, or close them if that fails or there is no room for
        them."""
        kept = False
        self._returning += 1
        try:
            kept = episode.is_reusable and await episode.reset_state()
        finally:
            self._returning -= 1
            self._lent.discard(episode)
            kept = kept and not self._filling.done() and self._has_room()
            if kept:
                self._ready.append(episode)
            self._returned.set()
            self._changed.set()
        if not kept:
            await episode.close()

    async def close(self) -> None:
        """End what is ready and what is being started."""
        await cancel_tasks([self._filling, *self._starts])
        while self._ready:
            self._background.start_task(self._ready.popleft().close())
        if self._background.running:
            await asyncio.wait(self._background.running)

    def _has_room(self) -> bool:
        count = len(self._ready) + len(self._starts) + len(self._lent)
        if count >= self.size:
            return False
        fits = (count + 1) * self._largest <= self._config.memory_mib * 2**20
        if not fits and not self._told_of_memory:
            self._told_of_memory = True
            _LOG.warning(
                "warm_servers_bound_by_memory",
                servers=self.name,
                ready=count,
                size=self.size,
                mib_each=self._largest // 2**20,
                memory_mib=self._config.memory_mib,
            )
        return fits

    async def _keep_filled(self) -> None:
        while True:
            while not self._has_room():
                self._changed.clear()
                await self._changed.wait()
            await self._await_quiet()
            if not self._has_room():
                # Servers that an episode had started itself were given to the pool meanwhile.
                continue
            start = asyncio.create_task(self._start_one())
            self._starts.add(start)
            start.add_done_callback(self._end_start)
            if not self._largest:
                # How many fit is known once one has started.
                await asyncio.wait({start})
            failed_s = self._backoff.next_wait_s() if self._failed else 0.0
            await asyncio.sleep(max(1 / self._config.starts_per_s, failed_s))

    async def _await_quiet(self) -> None:
        until = loop_time() + _LONGEST_S
        while (wait_s := min(self._taken_at + _QUIET_S, until) - loop_time()) > 0:  # noqa: ASYNC110
            await asyncio.sleep(wait_s)

    def _end_start(self, start: asyncio.Task[None]) -> None:
        self._starts.discard(start)
        self._changed.set()

    async def _start_one(self) -> None:
        try:
            async with self._cores:
                episode = await self._start()
        except (OSError, BackendError) as error:
            self._failed = True
            _LOG.warning("warm_start_failed", servers=self.name, error=str(error))
            return
        self._failed = False
        self._backoff.reset()
        self._largest = max(self._largest, measure_usage(episode.pids).memory_bytes)
        self._ready.append(episode)
