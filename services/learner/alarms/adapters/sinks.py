"""Construction of a run's alarm sinks from its spec."""

from pathlib import Path

from services.common.run_folder.metric_lines import ALARMS_FILE
from services.learner.alarms.adapters.jsonl_sink import JsonlAlarmSink
from services.learner.alarms.adapters.webhook_sink import WebhookAlarmSink, webhook_url
from services.learner.alarms.ports import AlarmSink
from services.learner.config.alarms import AlarmsConfig


def build_alarm_sinks(config: AlarmsConfig, run_id: str, run_dir: Path) -> list[AlarmSink]:
    """Build the alarm sinks of a run.

    Raises ConfigError if the webhook names a variable that holds no URL."""
    sinks: list[AlarmSink] = [JsonlAlarmSink(run_dir / ALARMS_FILE, run_id)]
    if config.webhook is not None:
        sinks.append(WebhookAlarmSink(webhook_url(config.webhook), run_id))
    return sinks
