# The launcher with SkyPilot, and the `flotilla` command. From the repository's folder:
#
#   docker build -f deploy/docker/launcher.Dockerfile -t flotilla-launcher .
#   docker run --name launcher --network host --user "$(id -u):$(id -g)" \
#       --tmpfs "/home/flotilla:mode=700,uid=$(id -u)" \
#       -v "$PWD:$PWD" --workdir "$PWD" -v "$HOME/.sky:/home/flotilla/.sky" \
#       -e SKYPILOT_API_SERVER_ENDPOINT -e FLEET_API_KEY \
#       -e AWS_ACCESS_KEY_ID -e AWS_SECRET_ACCESS_KEY \
#       flotilla-launcher --listen 0.0.0.0:7000 --advertise launcher.example.org
#   docker exec launcher flotilla train deploy/runs/qwen3-8b.toml --launcher.backend=sky \
#       --learner.checkpoint.remote=s3://BUCKET/PREFIX
#
# The folder is the repository, whose commit the machines get, and where runs/ is kept; --user is who
# may write it. It has the same path here as outside: an API server of this host, such as
# http://127.0.0.1:46580, is not sent the code of a run but looks for it there. On the host's network,
# because the machines call the launcher.

FROM python:3.11.14-slim-bookworm@sha256:65a93d69fa75478d554f4ad27c85c1e69fa184956261b4301ebaf6dbb0a3543d AS build
WORKDIR /src
RUN python -m venv /opt/flotilla && python -m venv /opt/build
COPY requirements/build.txt requirements/sky.txt requirements/
# One package of SkyPilot's is there as source alone.
RUN /opt/build/bin/pip install --no-cache-dir --no-deps --require-hashes --requirement requirements/build.txt \
    && /opt/flotilla/bin/pip install --no-cache-dir --no-deps --require-hashes --requirement requirements/build.txt \
    && /opt/flotilla/bin/pip install --no-cache-dir --no-deps --require-hashes --no-build-isolation \
        --requirement requirements/sky.txt
COPY pyproject.toml README.md LICENSE ./
COPY gen gen
COPY tools tools
COPY environments environments
COPY services services
RUN /opt/build/bin/pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /src/wheels . \
    && /opt/flotilla/bin/pip install --no-cache-dir --no-deps --no-index /src/wheels/*.whl

FROM python:3.11.14-slim-bookworm@sha256:65a93d69fa75478d554f4ad27c85c1e69fa184956261b4301ebaf6dbb0a3543d
# SkyPilot calls these. The distribution fixes their versions.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends curl git openssh-client procps rsync \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --create-home flotilla \
    && chmod 700 /home/flotilla \
    && install --directory --owner flotilla /work
COPY --from=build /opt/flotilla /opt/flotilla
# By --user somebody comes whom the image does not know: these are the name and the home to go by, which
# is then to be mounted: see above.
# What is installed here counts, not what is mounted; and that may be another user's, which git would
# refuse.
ENV HOME=/home/flotilla \
    USER=flotilla \
    LOGNAME=flotilla \
    PATH=/opt/flotilla/bin:$PATH \
    GIT_CONFIG_COUNT=1 \
    GIT_CONFIG_KEY_0=safe.directory \
    GIT_CONFIG_VALUE_0=* \
    PYTHONSAFEPATH=1 \
    PYTHONUNBUFFERED=1
USER 10001
WORKDIR /work
# It asks in the container's folder, where the launcher keeps runs/.
HEALTHCHECK --interval=15s --timeout=10s --start-period=1m --retries=3 \
    CMD ["/opt/flotilla/bin/python", "-P", "-m", "services.launcher.cli.healthcheck", "--runs", "runs"]
ENTRYPOINT ["/opt/flotilla/bin/python", "-P", "-m", "services.launcher", "--listen", "127.0.0.1:50051"]
