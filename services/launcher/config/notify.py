"""`[launcher.notify]`: the people who are notified of a run."""

from pydantic import Field

from services.common.config import ConfigModel


class SlackConfig(ConfigModel):
    """Messages in one thread per run. The token is read from the environment, never from a spec."""

    # Without a channel nothing is sent.
    channel: str | None = None
    token_env: str = "SLACK_BOT_TOKEN"
    api_url: str = "https://slack.com/api"


class NotifyConfig(ConfigModel):
    """Messages about a run's transitions and alarms."""

    slack: SlackConfig = SlackConfig()
    disable_slack: bool = False
    # Every message as JSON, to a URL in this environment variable.
    webhook_env: str | None = None
    # Lines of the log that a message about a failure carries.
    tail_lines: int = Field(default=20, ge=0, le=200)
