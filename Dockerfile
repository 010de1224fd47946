# One image for servers, bridge, relay and the command line: `docker compose up` builds it.
FROM python:3.11-slim
WORKDIR /app
# The dependencies are a layer of their own: a change of the code leaves it as it is.
COPY pyproject.toml constraints.txt ./
RUN python -c "import tomllib; \
project = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
extras = ('server', 'cli', 'sql', 'bridge', 'kafka', 'postgresql', 'mysql', 'ship', 'store', 'zstd'); \
of_extras = [line for extra in extras for line in project['optional-dependencies'][extra]]; \
print(*(line for line in project['dependencies'] + of_extras if not line.startswith('notify-tx')), sep='\n')" \
    > requirements.txt \
    && pip install --no-cache-dir -c constraints.txt -r requirements.txt \
    && useradd --create-home --uid 1000 notify && mkdir /data && chown notify /data
COPY README.md LICENSE ./
COPY notify notify
COPY storage storage
RUN pip install --no-cache-dir --no-deps .
USER notify
VOLUME /data
# Servers, bridges and relays touch the file while they make progress; other commands end, or take --no-healthcheck.
ENV NOTIFY_ALIVE_FILE=/tmp/alive
HEALTHCHECK --start-period=60s --interval=30s --timeout=10s \
    CMD ["python", "-c", "import os, sys, time; sys.exit(time.time() - os.stat('/tmp/alive').st_mtime > 60)"]
ENTRYPOINT ["notify"]
