"""gRPC's built-in retries: the errors, the number of attempts, and the excluded calls."""

# Every method may be repeated, so gRPC may retry. A stopping server may answer CANCELLED to the
# calls that it was serving. Never RESOURCE_EXHAUSTED: a message too large stays too large.
RETRY_POLICY = {
    "maxAttempts": 5,
    "initialBackoff": "0.2s",
    "maxBackoff": "5s",
    "backoffMultiplier": 2,
    "retryableStatusCodes": ["UNAVAILABLE", "CANCELLED"],
}
# Streams of requests are excluded: gRPC may drop the rest of one on a retry (seen in 1.85), and
# then the call hangs until its deadline. Callers repeat these themselves, from the start.
REQUEST_STREAMS = [
    {"service": "flotilla.learner.v1.GroupService", "method": "SubmitTrajectory"},
    {"service": "flotilla.learner.v1.TrainingService", "method": "ForwardBackward"},
    {"service": "flotilla.env_gateway.v1.EpisodeService", "method": "Grade"},
]
