"""Input of the doctor: a spec, the services' sections of it, and this machine."""

import asyncio
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from flotilla_common.spec.spec import SharedConfig
from flotilla_launcher.control.spec_check import check_command
from flotilla_launcher.doctor.findings import (
    Finding,
    NotApplicableError,
    UnprobedError,
    fail,
    first_line,
    ok,
    warn,
)
from flotilla_launcher.doctor.probe_process import run_command
from flotilla_launcher.run_spec import RunSpec
from flotilla_launcher.state import LEARNER, ROLLOUT, RunMode


@dataclass(frozen=True, slots=True)
class RunContext:
    """A run that is to be started. `sections` has the whole configuration of each service, with
    all defaults; services that `launcher.modules` replaces, or whose section is invalid, are
    absent."""

    plan: RunSpec
    environ: Mapping[str, str]
    # The folder of all runs.
    folder: Path
    # The interpreter that services have on this machine; None where only other machines have one.
    python: Path | None
    sections: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, Any])
    mode: RunMode = RunMode.TRAIN
    # Bytes of each GPU of the one machine to judge memory by; none: those that there are.
    gpus: tuple[int, ...] = ()

    @property
    def shared(self) -> SharedConfig:
        return self.plan.shared

    @property
    def backend(self) -> str:
        return self.plan.config.backend

    @property
    def policy_services(self) -> tuple[str, ...]:
        """The services of the run that hold the policy."""
        return tuple(each for each in (LEARNER, ROLLOUT) if each in self.plan.services)

    @property
    def sky_home(self) -> Path:
        """Folder in which SkyPilot keeps its catalog on this machine."""
        return Path(self.environ.get("HOME", "/nonexistent")) / ".sky"

    def get_section(self, service: str) -> Mapping[str, Any]:
        """Return the section of a service. Raises NotApplicableError if it is not known."""
        if service not in self.sections:
            raise NotApplicableError(f"the configuration of {service} is not known")
        return self.sections[service]

    def find_interpreter(self, *modules: str) -> str:
        """Return the services' interpreter. If it is not here, return the launcher's own for a
        probe that needs only these modules. Raises UnprobedError."""
        if self.python is not None:
            return str(self.python)
        lacking = [module for module in modules if find_spec(module) is None]
        if modules and not lacking:
            return sys.executable
        lacks = f"lacks {', '.join(lacking)}" if lacking else "is another one"
        raise self.make_unprobed_error(f"the launcher's own {lacks}")

    def make_unprobed_error(self, why: str) -> UnprobedError:
        """Build the error for a probe that needs the services' interpreter."""
        return UnprobedError(
            warn,
            f"not checked: there is no {self.plan.config.sky.python} here, and {why}",
            "make it here for the doctor (`make setup` makes .venv); machines make their own",
        )


def is_made_later(context: RunContext, path: str) -> bool:
    """Return whether one of the spec's [[prepare]] commands makes this file, and has not yet: what
    it creates, or another file that it is given the name of, or the folder of."""
    tables = [t for t in context.plan.tables.get("prepare", []) if isinstance(t, Mapping)]
    waiting = [table for table in tables if not Path(str(table.get("creates"))).exists()]
    names = {path, str(Path(path).parent)}
    named = any(names & {t.get("creates"), *t.get("command", ())} for t in waiting)
    return named and not Path(path).exists()


def make_run_context(plan: RunSpec, folder: Path, environ: Mapping[str, str]) -> RunContext:
    """Make the context of a plan, without the services' sections."""
    python: Path | None = Path(sys.executable)
    if plan.config.backend == "sky":
        there = Path(plan.config.sky.python)
        python = there.absolute() if there.exists() else None
    return RunContext(plan, environ, folder, python)


async def read_sections(context: RunContext) -> tuple[dict[str, Mapping[str, Any]], list[Finding]]:
    """Return each service's view of its part of the spec, and its objections."""
    services = context.plan.services
    read = await asyncio.gather(*(_read_section(context, service) for service in services))
    sections = {service: section for service, section, _ in read if section is not None}
    findings = [finding for _, _, finding in read if finding is not None]
    return sections, findings or [ok(f"valid for {', '.join(sections) or 'the launcher'}")]


async def _read_section(
    context: RunContext, service: str
) -> tuple[str, Mapping[str, Any] | None, Finding | None]:
    if service in context.plan.config.modules:
        # Whatever it would print, its keys are not those that the probes know.
        return service, None, None
    command = (*check_command({}, service)[:-1], "--print-config")
    given = context.plan.text.encode()
    code, output, errors = await run_command(command, given, context.environ)
    if code != 0:
        reason = errors.strip() or f"exited with code {code}"
        return service, None, fail(f"{service}: {reason}", "correct the spec")
    try:
        return service, json.loads(output), None
    except ValueError:
        what = f"{service}: its configuration is no JSON: {first_line(output)}"
        return service, None, fail(what, "install all services from one version")
