"""Retries that gRPC makes by itself: after which errors, how often, and of which calls never."""

# Every method may be repeated, so gRPC itself may retry. A server that stops may answer CANCELLED
# to the calls it was serving. Never RESOURCE_EXHAUSTED: a message too large stays too large.
RETRY_POLICY = {
    "maxAttempts": 5,
    "initialBackoff": "0.2s",
    "maxBackoff": "5s",
    "backoffMultiplier": 2,
    "retryableStatusCodes": ["UNAVAILABLE", "CANCELLED"],
}
# But no stream of requests: gRPC may forget the rest of one when it sends it again (seen in 1.85),
# and then the call hangs until its deadline. Callers repeat these themselves, from the start.
REQUEST_STREAMS = [
    {"service": "flotilla.learner.v1.GroupService", "method": "SubmitTrajectory"},
    {"service": "flotilla.env_gateway.v1.EpisodeService", "method": "Grade"},
]
