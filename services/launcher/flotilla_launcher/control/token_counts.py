"""Tokens of a run at a Tinker service, summed over the processes that report them. Pure.

A process reports how many it has had since its start, a learner since its run began. The greatest
report of each process counts, and all of them together: so a report that comes twice, late or to
another launcher changes nothing, and a process that replaces another adds to what that had."""

from collections.abc import Mapping
from dataclasses import replace

from flotilla_launcher.state import LEARNER, TokenCount

# What services report with their heartbeats.
_OF_ROLLOUT = {"prompt": "tokens/prompt_total", "sampled": "tokens/sampled_total"}
_OF_LEARNER = {"trained": "tokens/trained_total"}
_MOST = 2**53


def note_tokens(
    known: Mapping[str, TokenCount],
    service: str,
    incarnation: str,
    metrics: Mapping[str, float],
) -> Mapping[str, TokenCount]:
    """Return the counts of a run's processes after one of them has reported these metrics."""
    # A learner's count survives its process.
    source, names = (LEARNER, _OF_LEARNER) if service == LEARNER else (incarnation, _OF_ROLLOUT)
    before = known.get(source, TokenCount())
    read = {kind: _read_count(metrics, name) for kind, name in names.items()}
    now = replace(before, **{k: max(getattr(before, k), count) for k, count in read.items()})
    return known if now == before else {**known, source: now}


def sum_tokens(counts: Mapping[str, TokenCount]) -> TokenCount:
    """Return the tokens of all processes of a run together."""
    every = counts.values()
    return TokenCount(
        prompt=sum(count.prompt for count in every),
        sampled=sum(count.sampled for count in every),
        trained=sum(count.trained for count in every),
    )


def _read_count(metrics: Mapping[str, float], name: str) -> int:
    """Return a count of tokens among the metrics of any process; 0 if there is none."""
    value = metrics.get(name, 0.0)
    return int(min(value, _MOST)) if value > 0 else 0
