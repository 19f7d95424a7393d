"""Probe of secrets: the variables to be handed to machines are set."""

from flotilla_launcher.doctor.findings import Finding, NotApplicableError, fail, ok
from flotilla_launcher.doctor.run_context import RunContext


async def probe_secrets(context: RunContext) -> list[Finding]:
    names = context.plan.config.sky.secrets if context.backend == "sky" else ()
    if not names:
        raise NotApplicableError("no variable is to be handed over")
    blank = [name for name in names if not context.environ.get(name, "").strip()]
    if blank:
        fix = f"export {blank[0]}, or take it out of launcher.sky.secrets"
        return [fail(f"not set, or blank: {', '.join(blank)}", fix)]
    return [ok(f"set: {', '.join(names)}")]
