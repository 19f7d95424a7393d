"""gRPC as every service uses it. `rpc.py` makes servers and channels, `channel.py` and
`peer_channels.py` clients of one service and of its replicas. `rpc_options.py` has sizes and
keepalive, `rpc_retries.py` what is repeated, `errors.py` what is raised; `tls.py` and `auth.py` say
who may call."""
