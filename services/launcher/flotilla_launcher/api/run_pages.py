"""Pages of the list of runs, from the ledger."""

from pathlib import Path

from flotilla.launcher.v1 import run_service_pb2 as pb
from flotilla_launcher.api import codec
from flotilla_launcher.store.ledger import Ledger, RunFilter

# The most runs of one page.
MOST_RUNS = 1_000


def list_page(store: Ledger, folder: Path, request: pb.ListRunsRequest) -> pb.ListRunsResponse:
    """Return the requested page, and the number of further runs that match."""
    # A state that only a newer client knows is that of no run.
    states = tuple(found or "" for found in codec.STATES.find_members(request.states))
    since = request.since.ToNanoseconds() / 1e9
    chosen, after = RunFilter(states, request.name, since), request.after_run_id
    limit = min(request.page_size or MOST_RUNS, MOST_RUNS)
    found = store.list_newest(chosen, after=after, limit=limit)
    more = store.count_runs(chosen, after=after) - len(found)
    runs = [codec.run_to_pb(stored, folder, brief=True) for stored in found]
    return pb.ListRunsResponse(runs=runs, more=more)
