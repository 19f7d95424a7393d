"""The front door's section of a run spec, `[tinker]`."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Self

from pydantic import Field, field_validator, model_validator

from flotilla_common.rpc.errors import ConfigError
from flotilla_common.rpc.network_addresses import check_listen
from flotilla_common.spec.config import ConfigModel
from flotilla_common.spec.number_ranges import Count, Seconds
from flotilla_common.spec.spec import ServiceConfig

if TYPE_CHECKING:
    from flotilla_common.spec.spec import SharedConfig

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
_VARIABLE = re.compile(r"\$[A-Z][A-Z0-9_]*")
_Bytes = Annotated[int, Field(ge=2**16, le=2**40)]


class KeyLimitsConfig(ConfigModel):
    """What each key may have at a time; more is answered by 429, and the client waits.

    `samples` counts requests for samples that have no result yet, `queued_bytes` the bodies of all
    orders that have none, `models` those that are loaded. `body_bytes` bounds one request: the SDK
    sends batches in parts of about 5 MB."""

    samples: Count = 4096
    queued_bytes: _Bytes = 2 * 2**30
    models: Count = 8
    body_bytes: _Bytes = 64 * 2**20


class RetentionConfig(ConfigModel):
    """How long results are kept: at least as long as a client may ask again, and undelivered ones
    longer. Beyond `bytes` the oldest go first. A client that asks for one that is gone is told so,
    by 410, and sends its order again. `session_s` ends sessions that send no heartbeat."""

    delivered_s: Seconds = 300.0
    undelivered_s: Seconds = 3600.0
    bytes: _Bytes = 4 * 2**30
    session_s: Seconds = 3600.0


class HttpsConfig(ConfigModel):
    """Certificate chain and key of this server, as PEM files."""

    certificate: Path
    key: Path


class TinkerConfig(ServiceConfig):
    """Section `[tinker]`.

    `listen` is where clients of the SDK come in: their TINKER_BASE_URL. Beyond loopback only with
    `tls`. `keys` maps the name of each key to the variable that holds it, as in `alice =
    "$ALICE_KEY"`; all that a client makes belongs to its key's name. `compress_batches` has clients
    compress the batches that they send, which pays on slow networks."""

    listen: str = "127.0.0.1:8700"
    keys: Mapping[str, str] = Field(min_length=1)
    limits: KeyLimitsConfig = Field(default_factory=KeyLimitsConfig)
    retention: RetentionConfig = Field(default_factory=RetentionConfig)
    tls: HttpsConfig | None = None
    compress_batches: bool = False
    # A stage without progress for so long is logged with its stack.
    stall_s: Seconds = 120.0

    @field_validator("keys")
    @classmethod
    def _keys_are_references(cls, keys: Mapping[str, str]) -> Mapping[str, str]:
        for name, value in keys.items():
            if not _NAME.fullmatch(name):
                raise ValueError(
                    f"{name!r}: use up to 63 of a-z 0-9 . _ -, a letter or digit first"
                )
            if not _VARIABLE.fullmatch(value):
                raise ValueError(
                    f"{name}: name the variable that holds the key, as in"
                    f' {name} = "$TINKER_API_KEY"; a key has no place in a spec'
                )
        return keys

    @model_validator(mode="after")
    def _listen_is_private_or_encrypted(self) -> Self:
        try:
            check_listen(self.listen, encrypted=self.tls is not None)
        except ConfigError as error:
            raise ValueError(
                f"listen: {self.listen}: beyond loopback set tinker.tls.certificate and"
                " tinker.tls.key, or reach it through an SSH tunnel"
                if "refusing" in str(error)
                else f"listen: {error}"
            ) from error
        return self

    def check(self, shared: "SharedConfig") -> None:
        for path in (self.tls.certificate, self.tls.key) if self.tls else ():
            if not path.is_file():
                raise ConfigError(f"tinker.tls: there is no file {path}")
