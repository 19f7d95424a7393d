"""Construction of the sink that delivers to a target. It imports only the vendors in use."""

import os

from flotilla_common.rpc.errors import ConfigError
from flotilla_launcher.notify.outbox import DeliveryTarget
from flotilla_launcher.notify.sinks import Sink


def make_sink(target: DeliveryTarget) -> Sink:
    """Make the sink that delivers to a target, with its secret from this process's environment."""
    secret = os.environ.get(target.secret_env, "")
    # The HTTP client is slow to import, and most launchers send no messages.
    if target.kind == "slack":
        from flotilla_launcher.notify.adapters.slack import SlackSink

        return SlackSink(target, secret)
    if target.kind == "webhook":
        from flotilla_launcher.notify.adapters.webhook import WebhookSink

        return WebhookSink(target, secret)
    raise ConfigError(f"the outbox has a letter for {target.kind!r}, an unknown kind of sink")
