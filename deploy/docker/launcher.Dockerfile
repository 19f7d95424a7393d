# The launcher with SkyPilot, and the `flotilla` command. Build in the repository's folder:
#
#   docker build -f deploy/docker/launcher.Dockerfile -t flotilla-launcher \
#       --build-arg FLOTILLA_COMMIT="$(git rev-parse HEAD)" .
#   docker run --name launcher --network host --user "$(id -u):$(id -g)" \
#       --tmpfs "/home/flotilla:mode=700,uid=$(id -u)" \
#       -v "$PWD:$PWD" --workdir "$PWD" -v "$HOME/.sky:/home/flotilla/.sky" \
#       -e SKYPILOT_API_SERVER_ENDPOINT -e FLEET_API_KEY \
#       -e AWS_ACCESS_KEY_ID -e AWS_SECRET_ACCESS_KEY \
#       flotilla-launcher --listen 0.0.0.0:7000 --advertise launcher.example.org
#   docker exec launcher flotilla train deploy/runs/qwen3-8b.toml --launcher.backend=sky \
#       --learner.checkpoint.remote=s3://BUCKET/PREFIX
#
# The folder is the repository, which holds runs/ and the commit for the machines; --user must be able
# to write it. It has the same path inside and outside, because an API server on this host, such as
# http://127.0.0.1:46580, reads a run's code from that path. The container uses the host's network,
# because the machines call the launcher.

FROM python:3.11.14-slim-bookworm@sha256:65a93d69fa75478d554f4ad27c85c1e69fa184956261b4301ebaf6dbb0a3543d AS build
WORKDIR /src
RUN python -m venv /opt/flotilla && python -m venv /opt/build
COPY requirements/build.txt requirements/sky.txt requirements/
# One of SkyPilot's packages is available only as source.
RUN /opt/build/bin/pip install --no-cache-dir --no-deps --require-hashes --requirement requirements/build.txt \
    && /opt/flotilla/bin/pip install --no-cache-dir --no-deps --require-hashes --requirement requirements/build.txt \
    && /opt/flotilla/bin/pip install --no-cache-dir --no-deps --require-hashes --no-build-isolation \
        --requirement requirements/sky.txt
COPY pyproject.toml README.md LICENSE ./
COPY gen gen
COPY environments environments
COPY services services
ARG FLOTILLA_COMMIT=unknown
RUN /opt/build/bin/pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /src/wheels \
        . ./gen ./environments ./services/* \
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
# With --user the image has no entry for the user: these set the name and the home, which must then be
# mounted (see above). PYTHONSAFEPATH: import the installed packages, not mounted files. safe.directory:
# git refuses a mounted repository of another user.
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
# The check reads runs/ in the container's working folder.
HEALTHCHECK --interval=15s --timeout=10s --start-period=1m --retries=3 \
    CMD ["/opt/flotilla/bin/python", "-P", "-m", "flotilla_launcher.cli.healthcheck", "--runs", "runs"]
ENTRYPOINT ["/opt/flotilla/bin/python", "-P", "-m", "flotilla_launcher", "--listen", "127.0.0.1:50051"]
