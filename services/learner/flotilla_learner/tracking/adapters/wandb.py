"""Metrics in Weights & Biases, or in its offline folder, which `wandb sync` uploads later."""

import netrc
import os
import shlex
import socket
from collections.abc import Mapping, Sequence
from dataclasses import astuple, fields
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import wandb
import wandb.errors

from flotilla_common.process.child_environment import seen_by_children
from flotilla_common.rpc.errors import ConfigError
from flotilla_common.telemetry.log import get_logger
from flotilla_learner.config.tracking import TrackingConfig
from flotilla_learner.ports import TrackedRun
from flotilla_learner.tracking.sampled_episodes import EpisodeSchedule, SampledEpisode
from flotilla_learner.types import Histogram

_log = get_logger(__name__)
_CONNECT_S = 3.0
_INIT_S = 30.0
# Seconds of an offline run that a kill may cost; wandb's own default is 15.
_FLUSH_S = 0.5


class WandbTracker:
    """One run of a project, continued under its id by every start. Implements `Tracker`.

    Points are plotted over the metric `step`, which is ours, not over wandb's own call count: a
    value logged later for an earlier step is kept, and no point waits for the next."""

    def __init__(
        self, config: TrackingConfig, name: str, folder: Path, spec: Mapping[str, Any]
    ) -> None:
        """Create it; `spec` is shown as the run's config and holds no secrets."""
        self._config = config
        self._name = name
        self._folder = folder
        self._spec = spec
        self._episodes = EpisodeSchedule(folder, config.episodes_every)
        self._run: wandb.Run | None = None
        with seen_by_children("WANDB_*"):
            wandb.setup()

    def open_run(self, run: TrackedRun) -> str | None:
        """Start the run; return its URL if it is online. Raises ConfigError if mode `online` is
        impossible, or wandb refuses its settings."""
        wanted = self._config.mode
        offline = "" if wanted == "online" else self._why_offline()
        if wanted == "online" and (reason := _why_no_key() or _why_unreachable()):
            raise ConfigError(f'{_error_prefix("online")}: {reason}; or set mode = "auto"')
        try:
            self._run = self._init_run(run, "offline" if offline else "online")
        except wandb.errors.CommError as error:
            if wanted == "online":
                raise ConfigError(f"{_error_prefix('online')}: {error}") from error
            offline = str(error)
            self._run = self._init_run(run, "offline")
        except (wandb.errors.Error, ValueError) as error:
            raise ConfigError(f"learner.tracking: wandb refuses the run: {error}") from error
        if offline:
            _log.info(
                "wandb is offline",
                reason=offline,
                upload=shlex.join(("wandb", "sync", str(Path(self._run.dir).parent))),
            )
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")
        self._episodes.begin_after(run.logged_step)
        return None if offline else self._run.url

    def log_metrics(
        self, step: int, metrics: Mapping[str, float], histograms: Mapping[str, Histogram]
    ) -> None:
        assert self._run is not None
        shapes = {
            name: wandb.Histogram(np_histogram=(np.array(shape.counts), np.array(shape.edges)))
            for name, shape in histograms.items()
        }
        self._run.log({"step": step, **metrics, **shapes})
        self._log_episodes(self._episodes.take_due(step))

    def close(self) -> None:
        if self._run is None:
            return
        try:
            # The dump of the last step is complete by now.
            self._log_episodes(self._episodes.take_due())
        finally:
            self._run.finish()

    def _log_episodes(self, episodes: Sequence[SampledEpisode]) -> None:
        """Log a table; its place on the x-axis is the step of its episodes."""
        if not episodes:
            return
        assert self._run is not None
        columns: list[Any] = [field.name for field in fields(SampledEpisode)]
        table = wandb.Table(columns=columns, data=[list(astuple(one)) for one in episodes])
        self._run.log({"step": episodes[0].step, "episodes": table})

    def _why_offline(self) -> str:
        """Return why the run must be offline; empty with a key and a network."""
        if self._config.mode == "offline":
            return 'learner.tracking.mode is "offline"'
        if wandb.setup().settings.mode == "offline":
            return "WANDB_MODE is offline"
        return _why_no_key() or _why_unreachable()

    def _init_run(self, run: TrackedRun, mode: str) -> "wandb.Run":
        return wandb.init(
            project=self._config.project,
            entity=self._config.entity,
            group=self._config.group,
            tags=list(self._config.tags),
            id=run.tracker_id,
            name=self._name,
            dir=str(self._folder),
            config=dict(self._spec),
            mode="offline" if mode == "offline" else "online",
            # Offline there is nothing to resume: `wandb sync` joins the parts of an id.
            resume=None if mode == "offline" else "allow",
            settings=_make_settings(),
        )


def _make_settings() -> wandb.Settings:
    return wandb.Settings(
        console="off",
        silent=True,
        disable_git=True,
        disable_code=True,
        init_timeout=_INIT_S,
        x_disable_stats=True,
        x_disable_meta=True,
        x_transaction_log_flush_interval=_FLUSH_S,
    )


def _error_prefix(mode: str) -> str:
    return f'learner.tracking: wandb cannot go {mode}, as mode = "{mode}" requires'


def _why_no_key() -> str:
    """Return why this machine has no key; empty if there is one."""
    settings = wandb.setup().settings
    host = urlsplit(str(settings.base_url)).hostname or ""
    if settings.api_key or settings.identity_token_file or _has_login(host):
        return ""
    return "no API key was found: set WANDB_API_KEY, or run `wandb login`"


def _has_login(host: str) -> bool:
    """Return True if `wandb login` left a key for this host."""
    path = os.environ.get("NETRC") or Path("~/.netrc").expanduser()
    try:
        return netrc.netrc(path).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def _why_unreachable() -> str:
    """Return why the server does not accept a connection; empty if it does."""
    url = urlsplit(str(wandb.setup().settings.base_url))
    port = url.port or (80 if url.scheme == "http" else 443)
    try:
        socket.create_connection((url.hostname or "", port), timeout=_CONNECT_S).close()
    except OSError as error:
        return f"{url.hostname} cannot be reached ({error})"
    return ""
