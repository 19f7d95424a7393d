"""What the launcher knows of runs with `learner.engine = "tinker"`, whose training and sampling a
Tinker service does: contradictions in their specs, and what such a service cannot give. Pure."""

from collections.abc import Iterator, Mapping
from typing import Any

from flotilla_common.rpc.errors import ConfigError
from flotilla_common.spec.spec import TINKER_KEY
from flotilla_launcher.config.launcher import LauncherConfig
from flotilla_launcher.state import LEARNER, ROLLOUT

ENGINE = 'learner.engine = "tinker"'
KEY_VARIABLE = TINKER_KEY
# Said at the start of every such run, and by the doctor.
LIMITS = (
    "the service computes the losses: of its own kinds only, without KL and entropy terms, and no"
    " entropy is measured",
    "its weights are never seen: a policy's fingerprint is that of its address there, and its"
    " samples are not audited by scoring them again",
    "that each token is of the policy that it names rests on the service's word; engine and trainer"
    " are compared by canaries at each update, and by the logprobs that it returns",
    "there are no metrics of GPUs and of the engine's caches",
)


def uses_tinker(tables: Mapping[str, Any]) -> bool:
    """Return whether a Tinker service trains the policy of a loaded spec."""
    return _table(tables, LEARNER).get("engine") == "tinker"


def check_key(environ: Mapping[str, str]) -> None:
    """Raise ConfigError if there is no key of a Tinker service in this environment."""
    if not environ.get(KEY_VARIABLE, "").strip():
        raise ConfigError(
            f"{KEY_VARIABLE} is not set: {ENGINE} needs the key of the service. Export it; a"
            " launcher that runs already has the environment that it began with, and ends by"
            " itself when it is idle"
        )


def list_contradictions(tables: Mapping[str, Any], config: LauncherConfig) -> Iterator[str]:
    """Yield what in a loaded spec cannot hold together."""
    kind = _table(_table(tables, ROLLOUT), "engine").get("kind", "vllm")
    if not uses_tinker(tables):
        yield from _list_misplaced(kind, config)
        return
    if kind == "vllm":
        yield (
            f'rollout.engine.kind: "vllm", but with {ENGINE} the weights stay with the service, and'
            " no other engine can load them; leave rollout.engine.kind out"
        )
    for service in (LEARNER, ROLLOUT):
        if config.gpu_counts()[service]:
            yield f"launcher.{service}.gpus: with {ENGINE} no process uses a GPU; leave it out"
    if config.max_cost is not None and config.token_prices is None:
        yield (
            f"launcher.max_cost: with {ENGINE} the service's tokens cost money too, so it cannot"
            " hold without launcher.token_prices (prompt, sample and train, in dollars per"
            " million); set them, or limit the run by launcher.max_tokens"
        )


def _list_misplaced(kind: Any, config: LauncherConfig) -> Iterator[str]:
    if kind == "tinker":
        yield (
            f'rollout.engine.kind: "tinker" samples what a Tinker service trains; set {ENGINE}, or'
            " leave rollout.engine.kind out"
        )
    for key in ("token_prices", "max_tokens"):
        if getattr(config, key) is not None:
            yield f"launcher.{key}: only a run with {ENGINE} is billed by tokens; leave it out"


def _table(tables: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a table of a spec; an empty one in place of what is no table, which others refuse."""
    found = tables.get(name)
    return found if isinstance(found, Mapping) else {}
