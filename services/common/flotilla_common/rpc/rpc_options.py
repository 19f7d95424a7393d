"""Options of gRPC channels and servers: message sizes, keepalive, reconnects.

grpcio's defaults do not notice a frozen peer, let two servers share one port, and reconnect after
seconds; the options here fix each of these, and tests/common/rpc/test_rpc_traps.py shows which."""

from typing import Any

# Contracts keep messages at or under 1 MiB; the slack is for the fields around a full chunk.
MAX_MESSAGE_BYTES = 2**20 + 2**16

_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # A peer that is frozen or cut off is noticed 5 seconds into a call. The keepalive timeout
    # alone has no effect: the ping timeout, a minute by default, ends the connection.
    ("grpc.keepalive_time_ms", 2_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.http2.ping_timeout_ms", 3_000),
    # Both sides ping: a limit below that rate would have healthy calls killed as "too many pings".
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 500),
    ("grpc.http2.max_ping_strikes", 0),
]
CHANNEL_OPTIONS = [
    *_OPTIONS,
    ("grpc.initial_reconnect_backoff_ms", 100),
    # This is also how long one attempt to connect may take.
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # Otherwise channels with equal options share one connection, and close it for each other.
    ("grpc.use_local_subchannel_pool", 1),
    # Peers are on this machine or in this run: the environment's proxy does not apply.
    ("grpc.enable_http_proxy", 0),
]
SERVER_OPTIONS = [
    *_OPTIONS,
    ("grpc.so_reuseport", 0),
    # Calls that Python has not taken up yet. By default gRPC cancels some at random beyond 1,000,
    # and all of them beyond 3,000: the openings of a large batch arrive together.
    ("grpc.server.max_pending_requests", 20_000),
    ("grpc.server.max_pending_requests_hard_limit", 40_000),
    # Unread stream data beyond this stays with the caller; by default gRPC probes the bandwidth and
    # buffers megabytes per stream.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 2**14),
]
