"""Run specs with less in them than a launcher accepts."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from flotilla_launcher.config.launcher import LauncherConfig
from flotilla_launcher.run_spec import RunSpec, read_spec

_LEAST = {"name": "none", "policy": {"model": "none", "max_model_len": 1}}


def bare_spec(tables: Mapping[str, Any], config: LauncherConfig | None = None) -> RunSpec:
    """Return a spec of these tables alone, which the launcher reads as this config."""
    return replace(read_spec(_LEAST), tables=tables, config=config or LauncherConfig())
