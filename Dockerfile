# One image for servers, bridge, relay and the command line: `docker compose up` builds it.
FROM python:3.11-slim
WORKDIR /app
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY notify notify
COPY storage storage
RUN pip install --no-cache-dir -c constraints.txt '.[server,sql,bridge,kafka,postgresql,mysql]' \
    && useradd --create-home --uid 1000 notify && mkdir /data && chown notify /data
USER notify
VOLUME /data
ENTRYPOINT ["notify"]
