"""`[launcher.notify]`: notifications about a run."""

from pydantic import Field

from flotilla_common.spec.config import ConfigModel


class SlackConfig(ConfigModel):
    """Messages in one thread per run. The token is read from the environment, never from a spec."""

    # Without a channel, no message is sent.
    channel: str | None = None
    token_env: str = "SLACK_BOT_TOKEN"
    api_url: str = "https://slack.com/api"


class NotifyConfig(ConfigModel):
    """Messages about a run's transitions and alarms."""

    slack: SlackConfig = SlackConfig()
    disable_slack: bool = False
    # Page of whatever submitted the run, such as a CI job, for the messages.
    link: str | None = Field(default=None, max_length=2_000)
    # Name of the environment variable with the URL that receives every message as JSON.
    webhook_env: str | None = None
    # Log lines quoted in a message about a failure.
    tail_lines: int = Field(default=20, ge=0, le=200)
