"""The part of a run spec that every service reads, and the tables of each service."""

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from flotilla_common.process.own_version import OwnVersion
from flotilla_common.rpc.errors import ConfigError
from flotilla_common.spec.config import ConfigModel, did_you_mean, parse_config
from flotilla_common.spec.number_ranges import MOST_TOKENS, Seconds, Tokens

SHARED = ("name", "seed", "policy", "written_by")
SERVICE_SECTIONS = ("env_gateway", "rollout", "learner", "launcher", "tinker")
SECTIONS = (*SHARED, *SERVICE_SECTIONS, "prepare")


# Variables of Tinker's client, by which a run at a service finds and may use it.
TINKER_KEY, TINKER_URL = "TINKER_API_KEY", "TINKER_BASE_URL"


class TinkerConfig(ConfigModel):
    """The Tinker service of a run with `learner.engine = "tinker"`."""

    # Absent: TINKER_BASE_URL, else the hosted service. The key comes from TINKER_API_KEY.
    url: str | None = Field(default=None, pattern=r"^https?://[^@\s]+$")
    # Its name of the base model; absent: policy.model.
    model: str | None = Field(default=None, min_length=1)
    # How long the service may be unreachable, or refuse for want of capacity or of credit, before
    # the run fails; work waits meanwhile.
    patience_s: Seconds = 3600.0


class VisionConfig(ConfigModel):
    """Pictures that the policy sees: those in observations of the environment.

    The rollout shows them to its engine, and the learner trains on the same bytes."""

    # Parts of the model that read pictures: "trained" updates them like all else.
    tower: Literal["frozen", "trained"] = "frozen"
    # What projects the tower's features into the text's embeddings (the merger).
    projector: Literal["frozen", "trained"] = "frozen"
    # Pictures of one conversation; another one ends the attempt.
    max_images: int = Field(default=32, ge=1, le=3072)
    # Bounds within which a picture is scaled, in place of those of the model's own processor.
    min_pixels: int | None = Field(default=None, ge=1, le=2**28)
    max_pixels: int | None = Field(default=None, ge=1, le=2**28)

    @property
    def is_trained(self) -> bool:
        """True if features of a picture change with the policy."""
        return "trained" in (self.tower, self.projector)

    @model_validator(mode="after")
    def _bounds_are_in_order(self) -> Self:
        least, most = self.min_pixels, self.max_pixels
        if least is not None and most is not None and least > most:
            raise ValueError(f"min_pixels: {least} are more than max_pixels, {most}")
        return self


class PolicyConfig(ConfigModel):
    """The trained and served model."""

    # A folder, or an id on the Hugging Face hub.
    model: str = Field(min_length=1)
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    max_model_len: Tokens
    # As in a Hugging Face config: rope_type, factor, original_max_position_embeddings.
    rope_scaling: dict[str, str | int | float] | None = None
    trust_remote_code: bool = False
    revision: str | None = None
    # For a mixture of experts: with "replay" the trainer uses the experts that the engine chose for
    # each token, weighted by its own router; "measure" only counts how often the two differ.
    routing_replay: Literal["off", "measure", "replay"] = "off"
    # Repeats learner.lora.rank, so that engines load the model once and receive only its adapters;
    # if absent, they receive whole weights with adapters merged in. vLLM allows no higher rank.
    adapter_rank: int | None = Field(default=None, ge=1, le=512)
    # Absent: the policy reads text only.
    vision: VisionConfig | None = None
    # Only read with learner.engine = "tinker".
    tinker: TinkerConfig = TinkerConfig()

    @model_validator(mode="after")
    def _rope_scaling_is_whole(self) -> Self:
        scaling = self.rope_scaling or {}
        for name, value in scaling.items():
            if not isinstance(value, str) and not 0 < value <= MOST_TOKENS:
                raise ValueError(f"rope_scaling.{name}: expected above 0; got {value}")
        for name in ("factor", "original_max_position_embeddings"):
            if scaling.get("rope_type") == "yarn" and isinstance(scaling.get(name, ""), str):
                raise ValueError(f"rope_scaling.{name}: yarn needs {name}, a number")
        return self

    def scaled_positions(self, own: int) -> int:
        """Return `max_position_embeddings` under the run's scaling, for a model with the value
        `own`.

        With YaRN, Transformers and vLLM expect the scaled length; vLLM refuses a longer one."""
        scaling = self.rope_scaling or {}
        if scaling.get("rope_type") != "yarn":
            return own
        original = float(scaling["original_max_position_embeddings"])
        return max(own, int(float(scaling["factor"]) * original))


def name_rollout_engine(spec: dict[str, Any]) -> dict[str, Any]:
    """Return a spec in which `learner.engine = "tinker"`, if it says so, holds for the rollout too:
    `rollout.engine.kind` is "tinker" unless the spec names another."""
    learner = spec.get("learner")
    if not isinstance(learner, Mapping) or learner.get("engine") != "tinker":
        return spec
    rollout: Any = spec.get("rollout", {})
    engine: Any = rollout.get("engine", {}) if isinstance(rollout, Mapping) else None
    if not isinstance(rollout, Mapping) or not isinstance(engine, Mapping):
        return spec
    return {**spec, "rollout": {**rollout, "engine": {"kind": "tinker", **engine}}}


class WriterConfig(ConfigModel):
    """The Flotilla that wrote a run's own spec.json."""

    version: str
    commit: str


class SharedConfig(ConfigModel):
    """The keys of a run spec that belong to all services."""

    # Part of paths and of shared-memory names.
    name: str = Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$")
    seed: int = Field(default=0, ge=0, lt=2**63)
    policy: PolicyConfig
    # Written by the launcher at each start of a run; nobody else sets it.
    written_by: WriterConfig | None = None


class ServiceConfig(ConfigModel):
    """A service's own section, which must fit the shared keys."""

    def check(self, shared: SharedConfig) -> None:
        """Raise ConfigError if the section does not fit the shared keys.

        `--check-config` calls this too, before anything is started."""


def parse_shared(spec: Mapping[str, Any], *, where: str) -> SharedConfig:
    """Parse the shared keys of a whole spec; refuse unknown top-level keys."""
    unknown = [
        f"  {key}: unknown key{did_you_mean(key, SECTIONS)}" for key in spec if key not in SECTIONS
    ]
    given = {key: spec[key] for key in SHARED if key in spec}
    if not unknown:
        return parse_config(SharedConfig, given, where=where)
    lines = [f"{where}: unknown top-level keys", *unknown]
    try:
        parse_config(SharedConfig, given, where=where)
    except ConfigError as error:
        lines.append(str(error))
    raise ConfigError("\n".join(lines))


def named_writer(spec: Mapping[str, Any]) -> OwnVersion | None:
    """Return the Flotilla that a run's own spec names; None if it names none."""
    named = parse_shared(spec, where="spec").written_by
    return OwnVersion(named.version, named.commit) if named else None
