"""Checks of a spec that need no launcher, before a command prepares or starts anything."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flotilla_common.spec.config import canonical_json
from flotilla_launcher.cli.launcher_client import open_launcher_log
from flotilla_launcher.config import tinker_rules
from flotilla_launcher.control.spec_check import check_tables
from flotilla_launcher.doctor.run_inputs import check_files
from flotilla_launcher.run_spec import parse_spec
from flotilla_launcher.security.launcher_address import address_from_environment


async def check_before_start(spec: Mapping[str, Any], where: str, runs: Path) -> None:
    """Raise ConfigError for wrong tables, and for files and a key that the run would miss on this
    machine; OSError if no launcher could begin a log in `runs`."""
    plan = parse_spec(canonical_json(spec), where)
    await check_tables(plan, where)
    if address_from_environment() is None:
        if plan.uses_tinker:
            tinker_rules.check_key(os.environ)
        check_files(plan)
        open_launcher_log(runs).close()
