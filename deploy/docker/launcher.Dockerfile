# The launcher with SkyPilot, and the `flotilla` command. From the repository's folder:
#
#   docker build -f deploy/docker/launcher.Dockerfile -t flotilla-launcher .
#   docker run --name launcher --network host -v "$PWD:/work" -v "$HOME/.sky:/home/flotilla/.sky" \
#       -e SKYPILOT_API_SERVER_ENDPOINT -e FLEET_API_KEY flotilla-launcher
#   docker exec launcher flotilla train deploy/runs/qwen3-8b.toml --launcher.backend=sky
#
# /work is the repository, whose commit the machines get, and where runs/ is kept; its owner must be
# user 10001, or add --user. On the host's network, because the machines call the launcher.

FROM python:3.11.14-slim-bookworm AS build
WORKDIR /src
RUN python -m venv /opt/flotilla
COPY requirements/sky.txt requirements/
RUN /opt/flotilla/bin/pip install --no-cache-dir --no-deps --requirement requirements/sky.txt
COPY pyproject.toml README.md ./
COPY gen gen
COPY tools tools
COPY environments environments
COPY services services
RUN /opt/flotilla/bin/pip install --no-cache-dir --no-deps .

FROM python:3.11.14-slim-bookworm
# SkyPilot calls these. The distribution fixes their versions.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends curl git openssh-client procps rsync \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --create-home flotilla \
    && install --directory --owner flotilla /work /run/flotilla
COPY --from=build /opt/flotilla /opt/flotilla
# What is installed here counts, not what is mounted in /work; and that may be another user's, which
# git would refuse.
ENV PATH=/opt/flotilla/bin:$PATH \
    GIT_CONFIG_COUNT=1 \
    GIT_CONFIG_KEY_0=safe.directory \
    GIT_CONFIG_VALUE_0=/work \
    PYTHONSAFEPATH=1 \
    PYTHONUNBUFFERED=1
USER 10001
WORKDIR /work
HEALTHCHECK --interval=15s --timeout=10s --start-period=1m --retries=3 \
    CMD ["/opt/flotilla/bin/python", "-m", "services.common.healthcheck", "--tls-dir", "/run/flotilla/tls"]
ENTRYPOINT ["/opt/flotilla/bin/python", "-m", "services.launcher", "--listen", "127.0.0.1:50051"]
