"""Job Groups out of their text."""

from typing import Any

import yaml


def load_job_group_from_yaml_str(text: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(text))
