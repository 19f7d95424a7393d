"""Settings of the backend of OpenEnv servers, `[env_gateway.backends.openenv]`."""

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, model_validator

from flotilla_common.spec.number_ranges import Seconds
from flotilla_env_gateway.config.backends import ServerConfig

_TASK_FIELDS = (
    "key",
    "prompt",
    "env_key",
    "env_version",
    "data_key",
    "data_version",
    "seed",
    "episode_id",
    "env_variables",
)


class OpenEnvConfig(ServerConfig):
    """An OpenEnv server, by its WebSocket protocol; `{env_key}` in `url` and `path` is the task's.

    `actions`: the environment takes tool calls ("tools"), or actions of its own schema ("schema"),
    which is then offered as the one tool `step_tool`; "auto" decides by its /schema.
    `task_fields` maps the environment's arguments of `reset` to fields of the task; `seed` is a
    number derived from the task's key, and `env_variables.NAME` is possible.
    `reward`: the grade is the last reward of a step, or the sum of them, or the environment's
    rewards are only shown and the task's own verifier grades ("verifier"), without any database.
    `submit_tool` ends and grades an episode: it is not offered to the policy, but called for the
    grade with the final answer as `submit_argument`; "" if there is no such tool.
    The policy sees the fields in `first_observation` of `reset`'s result, by default all;
    `image_fields` of any observation hold images in base64.
    """

    path: str = ""
    actions: Literal["auto", "tools", "schema"] = "auto"
    step_tool: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_-]{0,63}$")] = "step"
    read_only_tools: tuple[str, ...] = ()
    task_fields: Mapping[str, str] = Field(
        default_factory=lambda: {
            "seed": "seed",
            "episode_id": "episode_id",
            "task_key": "key",
            "data_id": "data_key",
            "data_version": "data_version",
        }
    )
    reward: Literal["last", "sum", "verifier"] = "last"
    submit_tool: str = "submit_final_answer"
    submit_argument: str = "answer"
    first_observation: tuple[str, ...] | None = None
    image_fields: tuple[str, ...] = ()
    ping_interval_s: Seconds = 20.0

    _schemes: tuple[str, ...] = ("http://", "https://", "ws://", "wss://")

    @model_validator(mode="after")
    def _known_task_fields(self) -> "OpenEnvConfig":
        for name, field in self.task_fields.items():
            root, _, variable = field.partition(".")
            if root not in _TASK_FIELDS or (variable and root != "env_variables"):
                known = ", ".join(_TASK_FIELDS)
                raise ValueError(
                    f"task_fields.{name}: a task has no field {field!r}; use one of {known} or "
                    "env_variables.NAME"
                )
        return self
