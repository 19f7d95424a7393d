"""What the launcher knows of sampling for training: what a spec asks of an engine that lacks it.
Pure."""

from collections.abc import Iterator, Mapping
from typing import Any

from flotilla_launcher.state import LEARNER, ROLLOUT


def list_contradictions(tables: Mapping[str, Any]) -> Iterator[str]:
    """Yield what in a loaded spec cannot hold together."""
    learner, rollout = tables.get(LEARNER), tables.get(ROLLOUT)
    engine: Any = rollout.get("engine") if isinstance(rollout, Mapping) else None
    kind = engine.get("kind", "vllm") if isinstance(engine, Mapping) else "vllm"
    limited = isinstance(learner, Mapping) and learner.get("top_k") is not None
    if limited and kind == "fake":
        yield (
            'rollout.engine.kind: "fake" does not name the tokens that it could have sampled, which'
            ' learner.top_k trains with; set it to "vllm", or leave learner.top_k out'
        )
