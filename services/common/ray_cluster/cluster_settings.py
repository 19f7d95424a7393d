"""Settings that all nodes and drivers of a cluster share."""

import hashlib
import hmac
from collections.abc import Mapping
from pathlib import Path

# What runs on a node asks the hub for files of a model.
HUB_TOKEN = "HF_TOKEN"
# Bytes of each node's object store, the least that Ray takes: nothing of ours goes through it.
OBJECT_STORE_BYTES = 80 * 1024 * 1024

# A node that does not answer is dead after about ten seconds; by default it takes a minute.
_HEALTH_CHECKS = {
    "RAY_health_check_initial_delay_ms": "2000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
}


def derive_cluster_token(token: str) -> str:
    """Return the token of a run's cluster, from that of the run.

    Ray sends it in the clear: the run's own token cannot be told from it."""
    return hmac.new(token.encode(), b"flotilla ray cluster", hashlib.sha256).hexdigest()


def cluster_environment(token_file: Path) -> Mapping[str, str]:
    """Return the variables of a cluster's nodes and drivers; its token is in the file."""
    return {
        **_HEALTH_CHECKS,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token_file),
        # A node whose head is gone ends, to join the next one.
        "RAY_gcs_rpc_server_reconnect_timeout_s": "10",
        # Ranks choose their GPUs by their place on the machine.
        "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
