"""Fields of a task, in either of Fleet's vocabularies."""

from collections.abc import Iterable

from flotilla_common.spec.config import did_you_mean

TASK_FIELDS = frozenset(
    (
        *("key", "prompt", "env_id", "version", "data_id", "data_version", "verifier_func"),
        *("task_key", "env_key", "env_version", "data_key", "verifier_code"),
        *("env_variables", "task_modality", "offered_tools", "servers", "passes_untouched"),
        *("difficulty", "metadata"),
        # Only Fleet itself reads these; its SDK writes them.
        *("id", "created_at", "team_id", "environment_id", "output_json_schema"),
        *("verifier", "verifier_id", "verifier_sha", "verifier_runtime_version"),
    )
)


def describe_unknown_field(fields: Iterable[str]) -> str:
    """Return what is wrong with the first field that no task has; "" if all are known."""
    unknown = next((name for name in fields if name not in TASK_FIELDS), None)
    if unknown is None:
        return ""
    hint = did_you_mean(unknown[:100], sorted(TASK_FIELDS))
    return f"unknown field {unknown[:100]!r}{hint} (data of your own belongs in `metadata`)"
