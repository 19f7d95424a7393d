# The learner on NVIDIA GPUs. Build in the repository's folder:
#
#   docker build -f deploy/docker/learner.Dockerfile -t flotilla-learner \
#       --build-arg FLOTILLA_COMMIT="$(git rev-parse HEAD)" .
#   docker run --gpus all --ipc host -v "$PWD:/work" -e FLOTILLA_TOKEN flotilla-learner \
#       --config deploy/runs/qwen3-8b.toml --run-id RUN
#
# User 10001 must be able to write /work, which holds runs/. Alternatively add
# --user "$(id -u):$(id -g)" --tmpfs "/home/flotilla:mode=700,uid=$(id -u)": the home must be private.
#
# Beyond loopback it requires TLS: mount the run's certificates and set its address,
# -v DIR:/run/flotilla/tls:ro ... --tls-dir /run/flotilla/tls --listen 0.0.0.0:50051 --advertise HOST

FROM python:3.11.14-slim-bookworm@sha256:65a93d69fa75478d554f4ad27c85c1e69fa184956261b4301ebaf6dbb0a3543d AS build
WORKDIR /src
RUN python -m venv /opt/flotilla && python -m venv /opt/build
COPY requirements/build.txt requirements/learner.txt requirements/
RUN /opt/build/bin/pip install --no-cache-dir --no-deps --require-hashes --requirement requirements/build.txt \
    && /opt/flotilla/bin/pip install --no-cache-dir --no-deps --require-hashes --requirement requirements/learner.txt
COPY LICENSE ./
COPY gen gen
COPY services/common services/common
COPY services/learner services/learner
ARG FLOTILLA_COMMIT=unknown
RUN /opt/build/bin/pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /src/wheels \
        ./gen ./services/common ./services/learner \
    && /opt/flotilla/bin/pip install --no-cache-dir --no-deps --no-index /src/wheels/*.whl

FROM python:3.11.14-slim-bookworm@sha256:65a93d69fa75478d554f4ad27c85c1e69fa184956261b4301ebaf6dbb0a3543d
RUN useradd --uid 10001 --create-home flotilla \
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
# Loading a large model takes long; until then the service reports that it is not serving.
HEALTHCHECK --interval=15s --timeout=10s --start-period=30m --retries=3 \
    CMD ["/opt/flotilla/bin/python", "-P", "-m", "flotilla_common.healthcheck", "--tls-dir", "/run/flotilla/tls"]
ENTRYPOINT ["/opt/flotilla/bin/python", "-P", "-m", "flotilla_learner", "--listen", "127.0.0.1:50051"]
CMD ["--help"]
