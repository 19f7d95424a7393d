"""Ownership of a run: each start of a learner first claims its epoch in the store."""

import asyncio
import shlex
from collections.abc import Callable
from typing import Any, TypeVar

from flotilla_common.rpc.errors import ConfigError
from flotilla_learner.checkpoints import remote_staging
from flotilla_learner.checkpoints.background_uploads import BackgroundUploads
from flotilla_learner.checkpoints.remote_layout import Marker
from flotilla_learner.checkpoints.remote_target import RemoteTarget
from flotilla_learner.checkpoints.remote_upload import Identity, read_markers, retry_request, sleep
from flotilla_learner.checkpoints.uploads import CheckpointUploads
from flotilla_learner.journal.store import Journal
from flotilla_learner.ports import RemoteStore, RemoteStoreRefusedError

T = TypeVar("T")

# Key in the journal's meta: names of the markers of all starts that led to it.
KNOWN_MARKERS = "remote_markers"
# Key in the journal's meta: result of the last restoration.
RESTORED = "restored"


async def check_claims(place: RemoteTarget | None, journal: Journal, run_id: str) -> None:
    """Raise ConfigError if the store has a start of this run that the journal does not know.

    That happens if an old disk comes back, or a new run has an old run's id. A store that
    refuses also raises ConfigError; an unreachable one raises another RemoteStoreError."""
    if place is None:
        return
    store = place.store
    known = (await journal.read_meta()).get(KNOWN_MARKERS, [])
    try:
        markers = await asyncio.to_thread(_request, lambda: read_markers(store))
    except RemoteStoreRefusedError as error:
        raise ConfigError(f"learner.checkpoint.remote: {error}") from error
    foreign = max((m.run_epoch for m in markers if m.name not in known), default=None)
    if foreign is not None:
        raise ConfigError(
            f"learner.checkpoint.remote: {store.url} has epoch {foreign} of run {run_id}, which"
            f" {journal.path} does not know: the run continued elsewhere. To resume from there:"
            f" flotilla train SPEC --resume {shlex.quote(store.url)}, with another --runs folder;"
            " otherwise start a new run"
        )


async def claim_epoch(
    place: RemoteTarget | None, journal: Journal, who: Identity
) -> CheckpointUploads:
    """Claim the epoch in the store, and return the uploads.

    Raises ConfigError if another learner claims it at the same time, RemoteStoreError if the
    store is unreachable."""
    meta = await journal.read_meta()
    _report_losses(meta.get(RESTORED), journal, who.run_epoch)
    if place is None:
        return CheckpointUploads()
    forks = await journal.load_forks()
    marker = Marker(who.run_epoch, who.incarnation, forks[who.run_epoch])
    # Journal first: a claim missing from it would forever look like another learner's.
    await journal.set_meta({KNOWN_MARKERS: [*meta.get(KNOWN_MARKERS, []), marker.name]})
    await asyncio.to_thread(_claim, place.store, marker)
    await asyncio.to_thread(remote_staging.clear, place.run_dir)
    return BackgroundUploads(place, journal.path, who)


def _report_losses(restored: dict[str, Any] | None, journal: Journal, run_epoch: int) -> None:
    """Report losses once, at the first start after a restoration."""
    if restored is None or restored["newest_epoch"] + 1 != run_epoch:
        return
    if restored["lost"] or restored["lost_steps"]:
        text = (
            f"lost with the disk: at least {restored['lost']} acknowledged tries and"
            f" {restored['lost_steps']} steps that were newer than the restored checkpoint"
        )
        journal.incidents.report_incident("lost_with_disk", text, restored["url"])


def _claim(store: RemoteStore, marker: Marker) -> None:
    _request(lambda: store.write(marker.name, marker.encode()))
    markers = _request(lambda: read_markers(store))
    if any(m.run_epoch >= marker.run_epoch and m.name != marker.name for m in markers):
        _request(lambda: store.remove([marker.name]))
        raise ConfigError(
            f"learner.checkpoint.remote: another learner is resuming the run at {store.url},"
            f" in epoch {marker.run_epoch}: end one of them"
        )


def _request(request: Callable[[], T]) -> T:
    """Call the store with few retries: during startup nothing else is waiting."""
    return retry_request(request, sleep, attempts=4)
