"""Environments whose tools change while the gateway runs: told as events, and kept for alarms."""

import asyncio
from collections.abc import Sequence
from functools import partial

from flotilla_common.aio.bounded_dict import BoundedDict
from flotilla_common.rpc.deadlines import loop_time, seconds_left
from flotilla_common.telemetry.log import get_logger
from flotilla_env_gateway.episodes.call_gates import CallGates
from flotilla_env_gateway.episodes.episode_session import Session
from flotilla_env_gateway.limits.request_gates import NoPlaceError
from flotilla_env_gateway.ports import BackendError, Instance, Tool
from flotilla_env_gateway.tools.tool_drift import ToolHistory, compare_listings, digest_tools

_LOG = get_logger(__name__)
_IN_EPISODE = "tools_changed_in_episode"
# Between two listings of an episode whose server says again and again that its tools change.
_PAUSE_S = 1.0
_TIMEOUT_S = 30.0
_CHANGES = 256


class ToolWatch:
    """Compares the tools of every episode as it opens, and again when its environment says in
    mid-episode that they have changed. `changes` are the newest ones, each by its alarm and
    environment: what changed, and when."""

    def __init__(self, gates: CallGates) -> None:
        self._gates = gates
        self._history = ToolHistory()
        self.changes: BoundedDict[tuple[str, str], tuple[str, float]] = BoundedDict(_CHANGES)

    def note_opened(self, session: Session, instance: Instance, tools: Sequence[Tool]) -> None:
        """Compare an episode's tools with those of the episodes before it."""
        task = session.episode.spec.task
        session.listing, change = self._history.note_listed(task, instance.env_version, tools)
        if change is not None:
            self.changes[change.rule, task.env_key] = str(change), loop_time()
            _LOG.warning(
                change.rule,
                env=task.env_key,
                version=change.version,
                version_before=change.version_before,
                task=task.key,
                **change.difference.to_fields(),
            )
        instance.watch_tools(partial(self._note_announced, session, instance))

    def _note_announced(self, session: Session, instance: Instance) -> None:
        session.announced = True
        if session.listing_again is None or session.listing_again.done():
            session.listing_again = asyncio.create_task(self._list_again(session, instance))

    async def _list_again(self, session: Session, instance: Instance) -> None:
        """Tell the difference, and which of the tools that the policy was offered are gone."""
        assert session.listing is not None, "set before the episode is watched"
        newest, episode = session.listing, session.episode
        about = {
            "env": session.env_key,
            "version": instance.env_version,
            "episode_id": episode.episode_id,
        }
        while session.announced:
            session.announced = False
            until = min(loop_time() + _TIMEOUT_S, episode.ends_at)
            try:
                async with self._gates.hold_warming_place(session, "list_tools", until):
                    tools = await instance.list_tools(timeout_s=seconds_left(until))
            except (BackendError, NoPlaceError) as error:
                _LOG.warning(_IN_EPISODE, **about, error=str(error))
            else:
                session.record.note_tools(tools)
                before, newest = newest, digest_tools(tools)
                gone = compare_listings(session.listing, newest).removed
                session.vanished = frozenset(gone)
                if newest != before:
                    difference = compare_listings(before, newest)
                    _LOG.warning(_IN_EPISODE, **about, **difference.to_fields())
            await asyncio.sleep(_PAUSE_S)
