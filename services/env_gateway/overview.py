"""What bounds a gateway's work at this moment, in one form for people and for Prometheus."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from services.env_gateway.adaptive import BreakerState

if TYPE_CHECKING:
    from services.env_gateway.gateway import Gateway


@dataclass(frozen=True, slots=True)
class Limiter:
    """`of` is the environment of `episodes` and `calls`, or empty for all of them, and the backend
    of `creations`."""

    name: str
    of: str
    limit: int
    in_flight: int
    waiting: int


def limiters(gateway: "Gateway") -> list[Limiter]:
    admission = gateway.admission
    env_keys = sorted({*gateway.book.counts(), *gateway.counts.env_keys()})
    return [
        Limiter("episodes", "", admission.max_episodes, admission.held, admission.waiting),
        *(
            Limiter("episodes", env, admission.limit(env), *admission.use_of(env))
            for env in env_keys
        ),
        *(
            Limiter("calls", env, gate.limit, gate.in_flight, gate.waiting)
            for env, gate in sorted(gateway.caller.gates.by_env.items())
        ),
        *(
            Limiter("creations", backend, gate.limit, gate.in_flight, gate.waiting)
            for backend, creation in sorted(gateway.opener.creations.items())
            for gate in (creation.gate,)
        ),
    ]


def breakers(gateway: "Gateway") -> dict[str, BreakerState]:
    """By environment of which a tool has been called."""
    return {env: gate.breaker for env, gate in gateway.caller.gates.by_env.items()}
