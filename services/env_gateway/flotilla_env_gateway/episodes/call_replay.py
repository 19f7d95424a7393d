"""Tool calls of an episode, each run once: a repeat gets the stored answer."""

import asyncio

from flotilla_common.telemetry import trace
from flotilla_common.telemetry.watchdog import Watchdog
from flotilla_env_gateway.episodes import event_metrics
from flotilla_env_gateway.episodes.counters import GatewayCounts
from flotilla_env_gateway.episodes.episode_book import EpisodeLostError
from flotilla_env_gateway.episodes.episode_session import Session
from flotilla_env_gateway.episodes.tool_calls import ToolCaller
from flotilla_env_gateway.episodes.turn_line import TurnPlace
from flotilla_env_gateway.ports import CallAnswer


class CallReplayer:
    """Runs each call once, however often it is requested. A call continues when its caller
    disconnects."""

    def __init__(self, caller: ToolCaller, counts: GatewayCounts, watchdog: Watchdog) -> None:
        self._caller = caller
        self._counts = counts
        self._watchdog = watchdog

    async def answer_call(
        self, session: Session, call_seq: int, name: str, arguments_json: str, timeout_s: float
    ) -> tuple[CallAnswer, bool]:
        """Return (answer, True if it is a stored one). Raises CallSeqError and
        EpisodeLostError."""
        episode = session.episode
        tool = session.tools.get(name)
        parallel = tool is not None and tool.parallel
        new = episode.register_call(call_seq, parallel=parallel)
        if new:
            place = session.join_line(call_seq, shared=parallel)
            work = self._execute_call(session, call_seq, name, arguments_json, timeout_s, place)
            task = session.answers[call_seq] = asyncio.create_task(work)
            # Also for a call that never reaches its turn.
            task.add_done_callback(lambda _: session.line.leave_line(place))
            for old in episode.forget_old_calls():
                session.answers.pop(old)
        task = session.answers[call_seq]
        try:
            return await asyncio.shield(task), not new
        except asyncio.CancelledError:
            if not task.cancelled():
                raise
            raise EpisodeLostError(f"episode {episode.episode_id} {episode.detail}") from None

    async def _execute_call(
        self,
        session: Session,
        call_seq: int,
        name: str,
        arguments_json: str,
        timeout_s: float,
        place: TurnPlace,
    ) -> CallAnswer:
        env_key, was_tainted = session.env_key, session.episode.tainted
        facts = {
            "episode_id": session.episode.episode_id,
            "call_seq": call_seq,
            "env_key": env_key,
            "tool": name[:100],
        }
        with self._watchdog.stage("call tool"), trace.span("call", facts):
            answer = await self._caller.run_call(
                session, call_seq, name, arguments_json, timeout_s, place
            )
            trace.annotate({"outcome": answer.outcome.value, "attempts": answer.attempts})
        self._counts.count_call(env_key, answer)
        self._counts.tainted[env_key] += session.episode.tainted and not was_tainted
        event_metrics.observe_call(env_key, answer)
        return answer
