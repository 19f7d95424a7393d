"""What a module with verifiers of one's own imports: the `env` that they get, its databases, and
Fleet's helpers, which verifiers in task files use without importing them.

These names stay when others of this package move; docs/env_gateway.md has an example."""

from flotilla_env_gateway.verify.change_rules import IgnoreConfig
from flotilla_env_gateway.verify.database_diff import SnapshotDiff
from flotilla_env_gateway.verify.verifier_globals import (
    Database,
    Environment,
    ToolError,
    contains_number,
    extract_numbers,
    normalized_contains,
    normalized_string_comparison,
)

__all__ = [
    "Database",
    "Environment",
    "IgnoreConfig",
    "SnapshotDiff",
    "ToolError",
    "contains_number",
    "extract_numbers",
    "normalized_contains",
    "normalized_string_comparison",
]
