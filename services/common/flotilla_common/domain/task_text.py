"""The text of a task as the policy reads it, in every dialect and with every model."""

from collections.abc import Mapping, Sequence

_LABELS = {"LOGGED_IN_USER": "Logged in user ID", "LOGGED_IN_NAME": "Logged in as"}


def write_task(
    prompt: str, current_date: str, variables: Mapping[str, str], shown: Sequence[str] = ()
) -> str:
    """Return the environment's date and variables, if any, the prompt, then the first
    observation. The date is the environment's, never the host's."""
    lines = [f"{label}: {variables[key]}" for key, label in _LABELS.items() if key in variables]
    lines += [f"{key}: {value}" for key, value in sorted(variables.items()) if key not in _LABELS]
    if current_date:
        lines.insert(
            0,
            f"Today is {current_date}. When a date has no year, assume the current or a future"
            " year.",
        )
    return "\n\n".join([*(["\n".join(lines)] if lines else []), prompt, *shown])
