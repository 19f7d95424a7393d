# The learner on NVIDIA GPUs. From the repository's folder:
#
#   docker build -f deploy/docker/learner.Dockerfile -t flotilla-learner .
#   docker run --gpus all --ipc host -v "$PWD:/work" -e FLOTILLA_TOKEN flotilla-learner \
#       --config deploy/runs/qwen3-8b.toml --run-id RUN
#
# /work, where runs/ is kept, must be writable by user 10001; or add --user "$(id -u):$(id -g)".
#
# Beyond loopback it demands TLS: mount the certificates of the run and say where it is reached,
# -v DIR:/run/flotilla/tls:ro ... --tls-dir /run/flotilla/tls --listen 0.0.0.0:50051 --advertise HOST

FROM python:3.11.14-slim-bookworm AS build
WORKDIR /src
RUN python -m venv /opt/flotilla
COPY pyproject.toml README.md LICENSE ./
COPY requirements/gpu.txt requirements/
COPY gen gen
COPY tools tools
COPY environments environments
COPY services services
RUN /opt/flotilla/bin/pip install --no-cache-dir --constraint requirements/gpu.txt ".[learner,s3]"

FROM python:3.11.14-slim-bookworm
RUN useradd --uid 10001 --create-home flotilla \
    && chmod 777 /home/flotilla \
    && install --directory --owner flotilla /work /run/flotilla
COPY --from=build /opt/flotilla /opt/flotilla
# By --user somebody comes whom the image does not know: these are the name and the home to go by.
# What is installed here counts, not what is mounted in /work.
ENV HOME=/home/flotilla \
    USER=flotilla \
    LOGNAME=flotilla \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    PYTHONSAFEPATH=1 \
    PYTHONUNBUFFERED=1
USER 10001
WORKDIR /work
# Loading a large model takes its time; until then it is not serving.
HEALTHCHECK --interval=15s --timeout=10s --start-period=30m --retries=3 \
    CMD ["/opt/flotilla/bin/python", "-P", "-m", "services.common.healthcheck", "--tls-dir", "/run/flotilla/tls"]
ENTRYPOINT ["/opt/flotilla/bin/python", "-P", "-m", "services.learner", "--listen", "127.0.0.1:50051"]
CMD ["--help"]
