"""What a probe finds, and how findings become one result."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from services.common.secret_values import forms, secret_values


class Status(StrEnum):
    """Of a finding, the mildest first."""

    SKIPPED = "skipped"
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


_SEVERITY = tuple(Status)


class NotApplicableError(Exception):
    """There is nothing to probe; the message says why."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that a probe has to say; of a fault, also how it is mended."""

    status: Status
    detail: str


def ok(detail: str) -> Finding:
    return Finding(Status.OK, detail)


def warn(what: str, fix: str) -> Finding:
    return Finding(Status.WARN, f"{what}; {fix}")


def fail(what: str, fix: str) -> Finding:
    return Finding(Status.FAIL, f"{what}; {fix}")


class UnprobedError(Exception):
    """There is something to probe, which cannot be done here. That is no fault of the run, but
    somebody has to know of it."""

    def __init__(self, what: str, fix: str) -> None:
        super().__init__(f"{what}; {fix}")
        self.finding = warn(what, fix)


@dataclass(frozen=True, slots=True)
class Result:
    """All that one probe found, the worst first."""

    probe: str
    findings: tuple[Finding, ...]

    @property
    def status(self) -> Status:
        """That of the worst finding."""
        return self.findings[0].status if self.findings else Status.OK

    @property
    def detail(self) -> str:
        """A paragraph for each finding; what is not as bad as the worst begins with its status."""
        return "\n".join(
            found.detail if found.status is self.status else f"{found.status}: {found.detail}"
            for found in self.findings
        )

    def told(self, status: Status) -> list[str]:
        """The findings of this status alone."""
        return [f"{self.probe}: {f.detail}" for f in self.findings if f.status is status]

    def body(self) -> dict[str, str]:
        return {"probe": self.probe, "status": self.status.value, "detail": self.detail}


def combine(probe: str, findings: Sequence[Finding]) -> Result:
    """All findings of a probe as one result."""
    ordered = sorted(findings, key=lambda f: _SEVERITY.index(f.status), reverse=True)
    return Result(probe, tuple(ordered))


def first_line(text: str, limit: int = 300) -> str:
    """What of a foreign error message goes into a detail."""
    return (text.strip().splitlines() or [""])[0][:limit]


def hide(text: str, environ: Mapping[str, str], also: tuple[str, ...] = ()) -> str:
    """`text` without the values of variables that hold secrets, and of those in `also`: vendors
    repeat what they got."""
    for value, name in secret_values(environ, also).items():
        for form in sorted(forms(value), key=len, reverse=True):
            text = text.replace(form, f"[{name}]")
    return text
