# The env_gateway, with the environments of this repository. From the repository's folder:
#
#   docker build -f deploy/docker/env_gateway.Dockerfile -t flotilla-env-gateway .
#   docker run -v "$PWD:/work" -e FLOTILLA_TOKEN -e FLEET_API_KEY flotilla-env-gateway \
#       --config deploy/runs/openenv-fleet-grpo.toml --run-id RUN
#
# /work, where runs/ is kept, must be writable by user 10001; or add --user "$(id -u):$(id -g)".
#
# Beyond loopback it demands TLS: mount the certificates of the run and say where it is reached,
# -v DIR:/run/flotilla/tls:ro ... --tls-dir /run/flotilla/tls --listen 0.0.0.0:50051 --advertise HOST
#
# Verifiers that are not this repository's own run in bubblewrap, which an engine's default profile
# forbids: they are refused, or add --security-opt seccomp=unconfined. Fleet runs its own remotely.

FROM python:3.11.14-slim-bookworm AS build
WORKDIR /src
RUN python -m venv /opt/flotilla
COPY pyproject.toml README.md LICENSE ./
COPY requirements/cpu.txt requirements/
COPY gen gen
COPY tools tools
COPY environments environments
COPY services services
RUN /opt/flotilla/bin/pip install --no-cache-dir --constraint requirements/cpu.txt \
    ".[env-gateway,environments]"

FROM python:3.11.14-slim-bookworm
# The distribution fixes bubblewrap's version.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends bubblewrap \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --create-home flotilla \
    && chmod 777 /home/flotilla \
    && install --directory --owner flotilla /work /run/flotilla
COPY --from=build /opt/flotilla /opt/flotilla
# By --user somebody comes whom the image does not know: these are the name and the home to go by.
# What is installed here counts, not what is mounted in /work.
ENV HOME=/home/flotilla \
    USER=flotilla \
    LOGNAME=flotilla \
    PYTHONSAFEPATH=1 \
    PYTHONUNBUFFERED=1
USER 10001
WORKDIR /work
HEALTHCHECK --interval=15s --timeout=10s --start-period=2m --retries=3 \
    CMD ["/opt/flotilla/bin/python", "-P", "-m", "services.common.healthcheck", "--tls-dir", "/run/flotilla/tls"]
ENTRYPOINT ["/opt/flotilla/bin/python", "-P", "-m", "services.env_gateway", "--listen", "127.0.0.1:50051"]
CMD ["--help"]
