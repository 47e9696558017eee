# docker build -t cairn . && docker run -p 8000:8000 -v cairn:/models cairn
# For a GPU: --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu128 --build-arg EXTRAS=server,grammar,gpu
# The tag may move. To build on the same base every time, name its digest, which
# `docker buildx imagetools inspect python:3.11-slim` prints: --build-arg BASE=python:3.11-slim@sha256:...
ARG BASE=python:3.11-slim
FROM $BASE

ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG EXTRAS=server,grammar

RUN pip install --no-cache-dir "torch>=2.9,<2.14" --index-url "$TORCH_INDEX"
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY src ./src
RUN pip install --no-cache-dir ".[$EXTRAS]" \
    && useradd --create-home cairn && mkdir /models && chown cairn /models
USER cairn
ENV CAIRN_CACHE=/models HF_HOME=/models/hub PYTHONUNBUFFERED=1
WORKDIR /home/cairn
EXPOSE 8000
HEALTHCHECK --start-period=600s --interval=15s \
    CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health')"]
# Signals go to the server itself, which drains.
ENTRYPOINT ["cairn", "serve", "--host", "0.0.0.0"]
