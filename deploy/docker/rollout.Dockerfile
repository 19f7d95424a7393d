# A rollout worker with vLLM on NVIDIA GPUs. Build in the repository's folder:
#
#   docker build -f deploy/docker/rollout.Dockerfile -t flotilla-rollout \
#       --build-arg FLOTILLA_COMMIT="$(git rev-parse HEAD)" .
#   docker run --gpus all --ipc host -v "$PWD:/work" -e FLOTILLA_TOKEN flotilla-rollout \
#       --config deploy/runs/qwen3-8b.toml --run-id RUN \
#       --peer learner=127.0.0.1:7001 --peer env_gateway=127.0.0.1:7002
#
# User 10001 must be able to write /work, which holds runs/. Alternatively add
# --user "$(id -u):$(id -g)" --tmpfs "/home/flotilla:mode=700,uid=$(id -u)": the home must be private.
#
# Add --network host if the peers run outside of containers, and TLS if they are on other machines:
# -v DIR:/run/flotilla/tls:ro ... --tls-dir /run/flotilla/tls. It needs no inbound port.

FROM python:3.11.14-slim-bookworm@sha256:65a93d69fa75478d554f4ad27c85c1e69fa184956261b4301ebaf6dbb0a3543d AS build
WORKDIR /src
RUN python -m venv /opt/flotilla && python -m venv /opt/build
COPY requirements/build.txt requirements/rollout.txt requirements/
RUN /opt/build/bin/pip install --no-cache-dir --no-deps --require-hashes --requirement requirements/build.txt \
    && /opt/flotilla/bin/pip install --no-cache-dir --no-deps --require-hashes --requirement requirements/rollout.txt
COPY LICENSE ./
COPY gen gen
COPY services/common services/common
COPY services/rollout services/rollout
ARG FLOTILLA_COMMIT=unknown
RUN /opt/build/bin/pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /src/wheels \
        ./gen ./services/common ./services/rollout \
    && /opt/flotilla/bin/pip install --no-cache-dir --no-deps --no-index /src/wheels/*.whl

FROM python:3.11.14-slim-bookworm@sha256:65a93d69fa75478d554f4ad27c85c1e69fa184956261b4301ebaf6dbb0a3543d
# vLLM compiles kernels at run time. The distribution fixes the compiler's version.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
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
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    PYTHONSAFEPATH=1 \
    PYTHONUNBUFFERED=1
USER 10001
WORKDIR /work
# Loading and compiling a large model takes long; until then the service is not serving.
HEALTHCHECK --interval=15s --timeout=10s --start-period=30m --retries=3 \
    CMD ["/opt/flotilla/bin/python", "-P", "-m", "flotilla_common.healthcheck", "--tls-dir", "/run/flotilla/tls"]
ENTRYPOINT ["/opt/flotilla/bin/python", "-P", "-m", "flotilla_rollout", "--listen", "127.0.0.1:50051"]
CMD ["--help"]
