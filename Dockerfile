# One image for every service of Streetcar; the command chooses which.
#   docker build -t streetcar:0.1.0 .
# The CPU build of torch is much smaller than the default one. To take it, tell pip where it is:
#   docker build --build-arg PIP_ARGS="--extra-index-url URL" -t streetcar:0.1.0 .

FROM python:3.11.14-slim-bookworm AS build
ARG PIP_ARGS=""
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY services services
COPY scheduler_svc scheduler_svc
COPY kv_store kv_store
COPY gpu_worker gpu_worker
COPY kernels kernels
RUN python -m venv /opt/streetcar \
    && /opt/streetcar/bin/pip install --no-cache-dir ${PIP_ARGS} -c constraints.txt .
RUN STREETCAR_CACHE_DIR=/opt/models /opt/streetcar/bin/streetcar models pull

FROM python:3.11.14-slim-bookworm
RUN groupadd --gid 10001 streetcar \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /nonexistent streetcar
COPY --from=build /opt/streetcar /opt/streetcar
COPY --from=build /opt/models /opt/models
ENV PATH=/opt/streetcar/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    STREETCAR_CACHE_DIR=/opt/models
USER 10001:10001
WORKDIR /tmp
CMD ["streetcar", "up", "--http-host", "0.0.0.0", "--http-port", "8000"]
