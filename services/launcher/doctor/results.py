"""What a probe finds, and how findings become one result."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from services.common.secret_values import secret_values


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
    """What became of one probe."""

    probe: str
    status: Status
    detail: str

    def body(self) -> dict[str, str]:
        return {"probe": self.probe, "status": self.status.value, "detail": self.detail}


def combine(probe: str, findings: Sequence[Finding]) -> Result:
    """All findings of a probe, as bad as the worst of them, which comes first."""
    ordered = sorted(findings, key=lambda f: _SEVERITY.index(f.status), reverse=True)
    status = ordered[0].status if ordered else Status.OK
    return Result(probe, status, "\n".join(finding.detail for finding in ordered))


def first_line(text: str, limit: int = 300) -> str:
    """What of a foreign error message goes into a detail."""
    return (text.strip().splitlines() or [""])[0][:limit]


def hide(text: str, environ: Mapping[str, str], also: tuple[str, ...] = ()) -> str:
    """`text` without the values of variables that hold secrets, and of those in `also`: vendors
    repeat what they got."""
    for value, name in secret_values(environ, also).items():
        text = text.replace(value, f"[{name}]")
    return text
