"""Findings of probes, and how they combine into one result per probe."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from flotilla_common.text.redaction import secret_values, written_forms


class Status(StrEnum):
    """Status of a finding, the mildest first."""

    SKIPPED = "skipped"
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


_SEVERITY = tuple(Status)


class NotApplicableError(Exception):
    """Raised when a probe does not apply to the run; the message gives the reason."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One observation of a probe; for a fault, also how to fix it."""

    status: Status
    detail: str


def ok(detail: str) -> Finding:
    return Finding(Status.OK, detail)


def warn(what: str, fix: str) -> Finding:
    return Finding(Status.WARN, f"{what}; {fix}")


def fail(what: str, fix: str) -> Finding:
    return Finding(Status.FAIL, f"{what}; {fix}")


class FindingError(Exception):
    """Raised when a probe ends with this finding; the message states the fault without its fix."""

    def __init__(self, judge: Callable[[str, str], Finding], what: str, fix: str) -> None:
        super().__init__(what)
        self.finding = judge(what, fix)


class UnprobedError(FindingError):
    """Raised when a probe applies but cannot run here. That is no fault of the run, but the
    user must know of it."""


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """All findings of one probe, the worst first."""

    probe: str
    findings: tuple[Finding, ...]

    @property
    def status(self) -> Status:
        """Status of the worst finding."""
        return self.findings[0].status if self.findings else Status.OK

    @property
    def detail(self) -> str:
        """One paragraph per finding; those milder than the worst begin with their status."""
        return "\n".join(
            found.detail if found.status is self.status else f"{found.status}: {found.detail}"
            for found in self.findings
        )

    def format_findings(self, status: Status) -> list[str]:
        """Format the findings of this status alone."""
        return [f"{self.probe}: {f.detail}" for f in self.findings if f.status is status]

    def to_dict(self) -> dict[str, str]:
        return {"probe": self.probe, "status": self.status.value, "detail": self.detail}


def combine_findings(probe: str, findings: Sequence[Finding]) -> ProbeResult:
    """Combine all findings of a probe into one result."""
    ordered = sorted(findings, key=lambda f: _SEVERITY.index(f.status), reverse=True)
    return ProbeResult(probe, tuple(ordered))


def first_line(text: str, limit: int = 300) -> str:
    """Return the part of a foreign error message that goes into a detail: its first line."""
    return (text.strip().splitlines() or [""])[0][:limit]


def last_line(text: str, limit: int = 300) -> str:
    """Return the last line of a foreign output that is not blank: errors come last."""
    return first_line("\n".join(reversed(text.strip().splitlines())), limit)


def hide_secrets(text: str, environ: Mapping[str, str], also: tuple[str, ...] = ()) -> str:
    """Replace the values of variables that hold secrets, and of those in `also`, by their
    names: vendors repeat what they were sent."""
    for value, name in secret_values(environ, also).items():
        for form in sorted(written_forms(value), key=len, reverse=True):
            text = text.replace(form, f"[{name}]")
    return text
