"""Verifiers that the operator names for environments, read from their files."""

from pathlib import Path

from flotilla_common.rpc.errors import ConfigError
from flotilla_env_gateway.config.gateway import EnvGatewayConfig
from flotilla_env_gateway.verify.verifier_source import find_verifier


def load_verifiers(config: EnvGatewayConfig) -> dict[str, str]:
    """Load the sources of `environments.KEY.verifier` that name files. Raises ConfigError with the
    name of a file that is missing or holds no verifier."""
    sources: dict[str, str] = {}
    for env_key, environment in config.environments.items():
        if environment.verifier is None or env_key in config.functions:
            continue
        try:
            sources[env_key] = Path(environment.verifier).read_text()
            find_verifier(sources[env_key])
        except (OSError, ValueError) as error:
            where = f"env_gateway.environments.{env_key}.verifier"
            hint = "; a function is MODULE:FUNCTION" if ":" in environment.verifier else ""
            raise ConfigError(f"{where}: {environment.verifier}: {error}{hint}") from error
    return sources
