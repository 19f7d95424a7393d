"""Settings that all nodes and drivers of a cluster share."""

import hashlib
import hmac
from collections.abc import Mapping
from pathlib import Path

# Processes on a node download files of a model from the hub.
HUB_TOKEN = "HF_TOKEN"
# Bytes of each node's object store: Ray's minimum, as we send nothing through it.
OBJECT_STORE_BYTES = 80 * 1024 * 1024

# Declares a silent node dead after about ten seconds; the default takes a minute.
_HEALTH_CHECKS = {
    "RAY_health_check_initial_delay_ms": "2000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
}


def derive_cluster_token(token: str) -> str:
    """Derive the token of a run's cluster from the run's token.

    Ray sends it in the clear: the run's own token cannot be recovered from it."""
    return hmac.new(token.encode(), b"flotilla ray cluster", hashlib.sha256).hexdigest()


def cluster_environment(token_file: Path) -> Mapping[str, str]:
    """Return the environment of a cluster's nodes and drivers; the token is in `token_file`."""
    return {
        **_HEALTH_CHECKS,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token_file),
        # A node whose head is gone ends, so that it can join the next one.
        "RAY_gcs_rpc_server_reconnect_timeout_s": "10",
        # Ranks choose their GPUs by their local rank.
        "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
