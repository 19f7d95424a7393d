"""Where a run's alarms go, besides its log."""

from pathlib import Path

from services.learner.alarms.adapters.jsonl_sink import AlarmFile
from services.learner.alarms.adapters.webhook_sink import Webhook, webhook_url
from services.learner.config.alarms import AlarmsConfig
from services.learner.ports import AlarmSink

ALARMS_FILE = "alarms.jsonl"


def alarm_sinks_of(config: AlarmsConfig, run_id: str, run_dir: Path) -> list[AlarmSink]:
    """Raises ConfigError when the webhook names a variable that holds no URL."""
    sinks: list[AlarmSink] = [AlarmFile(run_dir / ALARMS_FILE)]
    if config.webhook is not None:
        sinks.append(Webhook(webhook_url(config.webhook), run_id))
    return sinks
