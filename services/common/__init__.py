"""Plumbing of every service. A process begins in `service_main.py`, which reads `config.py` and
`spec.py` and hands a `runtime.py` to the service; `service_lifecycle.py` drains and ends it, and
`run_membership.py` reports to the launcher and carries out its commands.

Calls: `rpc.py` (servers, errors), `rpc_options.py` (sizes, keepalive), `rpc_retries.py`,
`channel.py` and `peer_channels.py` (clients), `tls.py`, `auth.py`, `health.py`. Children:
`child_environment.py`, `line_channel.py` and `parent_channel.py` (two sides), `run_child.py`.
Secrets: `redaction.py`. Tasks of asyncio: `concurrency.py`. `domain/` holds a trajectory's
types."""
