"""The worker on a further machine: it joins a learner and has its ranks do what that says."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

from services.common.concurrency import cancel_tasks, running_tasks, wait_unless
from services.common.log import get_logger
from services.learner.ports import RankError
from services.learner.ranks.pending_calls import Answer, RankHandle
from services.learner.ranks.ports import LearnerAwayError, LearnerClient, Membership

_AGAIN_S = 0.5
_log = get_logger(__name__)

# Starts this machine's ranks, in their order.
StartRanks = Callable[[], Awaitable[Sequence[RankHandle]]]


class MachineWorker:
    """A worker for one learner after the other; each failure of a learner ends its ranks."""

    def __init__(
        self, learner: LearnerClient, start: StartRanks, drain: asyncio.Event, patience_s: float
    ) -> None:
        """Make a worker that gives up after `patience_s` without a learner."""
        self._learner = learner
        self._start = start
        self._drain = drain
        self._patience_s = patience_s
        self._seen = time.monotonic()
        self._joined = False

    async def run_until_over(self) -> None:
        """Return when the learner has ended in order, or this machine is to go.

        Raises TimeoutError without a learner, WrongMachineError when it refuses this machine."""
        async with running_tasks(self._join_repeatedly()) as (work,):
            # A learner that has its ranks here is told, and drains first.
            if await wait_unless(self._drain, work) or self._joined:
                await work

    async def _join_repeatedly(self) -> None:
        while not await self._join_once():
            if self._drain.is_set():
                return
            await asyncio.sleep(_AGAIN_S)

    async def _join_once(self) -> bool:
        """Join a learner once and serve its calls; return True when the run is over."""
        try:
            async with (
                asyncio.timeout(self._left_s) as waiting,
                self._learner.join_learner() as member,
            ):
                waiting.reschedule(None)
                self._joined = True
                await self._serve_calls(member)
                return member.over
        except LearnerAwayError as error:
            _log.warning("the learner is away", why=str(error))
            return False
        except TimeoutError:
            raise TimeoutError(
                f"no learner for {self._patience_s:g} s: see its log, and that --registry or"
                " --peer learner=HOST:PORT is right"
            ) from None
        finally:
            if self._joined:
                self._joined = False
                self._seen = time.monotonic()

    @property
    def _left_s(self) -> float:
        return max(0.0, self._seen + self._patience_s - time.monotonic())

    async def _serve_calls(self, member: Membership) -> None:
        ranks = await self._start()
        leaving = asyncio.create_task(self._leave_on_drain(member))
        answering: set[asyncio.Task[None]] = set()
        try:
            async for call in member.receive_calls():
                # Sent here: calls reach a rank in their order.
                answer = ranks[call.rank].send_command(call.command, call.arguments)
                task = asyncio.create_task(
                    _answer_call(member, call.call, ranks[call.rank], answer)
                )
                answering.add(task)
                task.add_done_callback(answering.discard)
        finally:
            await cancel_tasks((leaving, *answering))
            # They may be waiting for ranks that are gone.
            for rank in ranks:
                rank.kill()
            await asyncio.gather(*(rank.close() for rank in ranks))

    async def _leave_on_drain(self, member: Membership) -> None:
        await self._drain.wait()
        _log.info("this machine has to go: the learner is told")
        member.announce_leaving()


async def _answer_call(member: Membership, call: int, rank: RankHandle, answer: Answer) -> None:
    try:
        member.send_result(call, await answer)
    except RankError as error:
        member.send_error(call, str(error), ended=rank.has_ended)
