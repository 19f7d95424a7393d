"""Options of a worker and of its burn-in, which the configuration makes. Plain values, and no
imports: reading a spec's tables must not load what a worker needs."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """Capacity of a worker, and the pace of its renewals and retries; times in seconds."""

    max_attempts: int
    renew_interval_s: float
    retry_pause_s: float
    attempt_timeout_s: float


@dataclass(frozen=True, slots=True)
class BurnInLengths:
    """Tokens of the burn-in's prompt and answer, and its time limit in seconds."""

    prompt: int
    answer: int
    timeout_s: float


@dataclass(frozen=True, slots=True)
class BurnInHints:
    """The smallest changes that help an engine with too little memory, or too little time."""

    memory: str
    time: str
