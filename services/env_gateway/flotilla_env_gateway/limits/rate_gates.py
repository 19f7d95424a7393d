"""Gates of a control plane's work, with a rate: creations, deletions and grades."""

from flotilla_env_gateway.config.gateway import EnvGatewayConfig
from flotilla_env_gateway.limits.adaptive_concurrency import AdaptiveLimit
from flotilla_env_gateway.limits.backend_health import RequestObserver, UsualTime
from flotilla_env_gateway.limits.refusal_pace import RefusalPace
from flotilla_env_gateway.limits.request_gates import Gate
from flotilla_env_gateway.limits.token_bucket import TokenBucket


def creation_gate(config: EnvGatewayConfig) -> Gate:
    return _instance_gate(config, config.open_timeout_s)


def deletion_gate(config: EnvGatewayConfig) -> Gate:
    """Make a gate for deletions alone, so that they do not wait behind creations."""
    return _instance_gate(config, config.close_timeout_s)


def _instance_gate(config: EnvGatewayConfig, timeout_s: float) -> Gate:
    limits = config.limits
    return Gate(
        AdaptiveLimit(start=limits.start_creating, ceiling=limits.max_creating),
        rate=TokenBucket(rate=limits.creates_per_s, burst=limits.creates_burst),
        # A machine that is not there yet is the control plane's concern.
        observer=RequestObserver(UsualTime.within_timeout(config.breaker, timeout_s)),
        weight_of=config.weight_of,
    )


def grade_gate(config: EnvGatewayConfig, *, apart: bool) -> Gate:
    """Make a gate for verifier runs. Refusals lower their rate and not their number in flight: a
    verifier may take long, and that many would be no more than a few a minute."""
    limits = config.limits
    usual = UsualTime.within_timeout(config.breaker, config.verifiers.timeout_s)
    return Gate(
        AdaptiveLimit(start=limits.start_grading, ceiling=limits.max_grading),
        rate=TokenBucket(rate=limits.grades_per_s, burst=limits.grades_burst),
        pace=RefusalPace(fastest_per_s=limits.grades_per_s),
        observer=RequestObserver(usual, apart=apart),
        weight_of=config.weight_of,
    )
