# The env_gateway, with the environments of this repository. Build in the repository's folder:
#
#   docker build -f deploy/docker/env_gateway.Dockerfile -t flotilla-env-gateway \
#       --build-arg FLOTILLA_COMMIT="$(git rev-parse HEAD)" .
#   docker run -v "$PWD:/work" -e FLOTILLA_TOKEN -e FLEET_API_KEY flotilla-env-gateway \
#       --config deploy/runs/openenv-fleet-grpo.toml --run-id RUN
#
# User 10001 must be able to write /work, which holds runs/. Alternatively add
# --user "$(id -u):$(id -g)" --tmpfs "/home/flotilla:mode=700,uid=$(id -u)": the home must be private.
#
# Beyond loopback it requires TLS: mount the run's certificates and set its address,
# -v DIR:/run/flotilla/tls:ro ... --tls-dir /run/flotilla/tls --listen 0.0.0.0:50051 --advertise HOST
#
# Verifiers from outside this repository run in bubblewrap, which the default seccomp profile forbids:
# add --security-opt seccomp=unconfined, or they are refused. Fleet runs its own verifiers remotely.

FROM python:3.11.14-slim-bookworm@sha256:65a93d69fa75478d554f4ad27c85c1e69fa184956261b4301ebaf6dbb0a3543d AS build
WORKDIR /src
RUN python -m venv /opt/flotilla && python -m venv /opt/build
COPY requirements/build.txt requirements/env_gateway.txt requirements/
RUN /opt/build/bin/pip install --no-cache-dir --no-deps --require-hashes --requirement requirements/build.txt \
    && /opt/flotilla/bin/pip install --no-cache-dir --no-deps --require-hashes --requirement requirements/env_gateway.txt
COPY LICENSE ./
COPY gen gen
COPY environments environments
COPY services/common services/common
COPY services/env_gateway services/env_gateway
ARG FLOTILLA_COMMIT=unknown
RUN /opt/build/bin/pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /src/wheels \
        ./gen ./environments ./services/common ./services/env_gateway \
    && /opt/flotilla/bin/pip install --no-cache-dir --no-deps --no-index /src/wheels/*.whl

FROM python:3.11.14-slim-bookworm@sha256:65a93d69fa75478d554f4ad27c85c1e69fa184956261b4301ebaf6dbb0a3543d
# The distribution fixes bubblewrap's version.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends bubblewrap \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --create-home flotilla \
    && chmod 700 /home/flotilla \
    && install --directory --owner flotilla /work /run/flotilla
COPY --from=build /opt/flotilla /opt/flotilla
# With --user the image has no entry for the user: these set the name and the home, which must then be
# mounted (see above). PYTHONSAFEPATH: import the installed packages, not files in /work.
ENV HOME=/home/flotilla \
    USER=flotilla \
    LOGNAME=flotilla \
    PYTHONSAFEPATH=1 \
    PYTHONUNBUFFERED=1
USER 10001
WORKDIR /work
HEALTHCHECK --interval=15s --timeout=10s --start-period=2m --retries=3 \
    CMD ["/opt/flotilla/bin/python", "-P", "-m", "flotilla_common.healthcheck", "--tls-dir", "/run/flotilla/tls"]
ENTRYPOINT ["/opt/flotilla/bin/python", "-P", "-m", "flotilla_env_gateway", "--listen", "127.0.0.1:50051"]
CMD ["--help"]
