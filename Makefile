# `make demo` and `make test` are all the set-up a new machine needs.
SHELL := /bin/bash
PY := .venv/bin/python
STAMP := .venv/.installed
DOCS_STAMP := .venv-docs/.installed
RELEASE_STAMP := .venv-release/.installed
DEMO_STAMP := .venv-demo/.installed
COMPILED_STAMP := .venv/.compiled

.PHONY: docs pictures reference release install demo cluster-demo test test-quick test-long test-slow check compiled mysql crash crash-auto crash-bridge crash-history crash-movers crash-cluster crash-disk crash-fair crash-held crash-kafka crash-proxy crash-schedules crash-store crash-withdraw matrix-kafka simulate bench bench-queue bench-backlog bench-sql bench-audit bench-audit-fan-in bench-console bench-observed bench-shipping bench-kafka bench-consumers bench-session bench-long-query bench-peers profile siege soak compare fuzz audit-backup audit-faults audit-cluster audit-load audit-watch clean
install: $(STAMP)

# No more than the site needs, neither Spark nor browsers; ruff breaks the lines of signatures.
$(DOCS_STAMP): constraints.txt
	python3 -m venv .venv-docs
	.venv-docs/bin/pip install --quiet --disable-pip-version-check -c constraints.txt mkdocs 'mkdocstrings[python]' Pygments ruff
	touch $@

# Tools that make and look at distributions.
$(RELEASE_STAMP): constraints.txt
	python3 -m venv .venv-release
	.venv-release/bin/pip install --quiet --disable-pip-version-check -c constraints.txt build pip-audit twine
	touch $@

$(STAMP): pyproject.toml constraints.txt
	@bash tests/install-system-packages
	python3 -m venv .venv
	.venv/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

# Only the server, in an environment of its own: 230 MB, and nothing from the system but Python and its venv.
$(DEMO_STAMP): pyproject.toml constraints.txt
	@python3 -c 'import ensurepip' 2>/dev/null || bash tests/install-system-packages venv
	python3 -m venv .venv-demo
	.venv-demo/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[server]'
	touch $@

# On SQLite, and with no more than the server. With DSN=postgresql://… (a database driver) or AUDIT=1 (at the end Spark
# reconciles the databases with what was delivered; see notify-audit/report.html) it needs everything.
DEMO_NEEDS := $(if $(or $(DSN),$(AUDIT),$(wildcard $(STAMP))),$(STAMP),$(DEMO_STAMP))
demo: $(DEMO_NEEDS)
	@$(dir $(DEMO_NEEDS))bin/python -m notify.cli.main demo $(if $(DSN),--dsn $(DSN),) $(if $(AUDIT),--audit notify-audit,)

# The same shop on MariaDB, three servers, a bridge and a queue; DATABASE=mysql or postgresql; KAFKA=1: on three Kafka nodes
# instead of the queue.
cluster-demo: install
	@$(PY) -m tests.cluster_demo $(if $(KAFKA),--kafka,) $(if $(DATABASE),--database $(DATABASE),) \
		$(if $(AUDIT),--audit notify-audit,)

# Everything but what is marked `long`, in 10 minutes at most; the slowest tests are named. Most tests wait for servers: five
# workers keep two cores busy (tests/support). RERUNS=1: a test that fails is run once more, and the run names it with its
# traceback; for continuous integration, where thousands of tests of real servers share a machine that nobody knows.
WORKERS ?= 5
RERUNS ?= 0
test: install
	@$(MAKE) --no-print-directory --jobs=2 check compiled mysql
	$(PY) -m pytest -n $(WORKERS) --durations=25 --reruns $(RERUNS) --rerun-show-tracebacks

# Compiles the code and the tests of a new checkout: otherwise each worker does so, which takes 9 s of a processor, and
# each worker's fork server again, since pytest, which rewrites assertions, has bytecode of its own. To look at all tests
# takes as long, so what changes later is left to the workers. The run itself shows what cannot be collected.
compiled: $(COMPILED_STAMP)
$(COMPILED_STAMP): $(STAMP)
	@$(PY) -m compileall -q notify storage spark tools tests > /dev/null || true
	@$(PY) -m pytest --collect-only --quiet > /dev/null || true
	@touch $@

# Unpack MySQL's programs once from Debian's packages; print their version, or why there is none. 15 s.
mysql: install
	@$(PY) -m notify.testing.mysql_programs

# The suite on one core beside two busy loops, as on a machine half as fast, to find time limits that are too short;
# PARTS='tests/unit …': only these folders. An hour.
PARTS ?= tests/unit tests/contract tests/simulation tests/integration
test-slow: install mysql
	@taskset -c 0 $(PY) -c 'while True: pass' & one=$$!; taskset -c 0 $(PY) -c 'while True: pass' & two=$$!; \
		trap "kill $$one $$two" EXIT; taskset -c 0 $(PY) -m pytest -n 2 $(PARTS)

# For every save: style, types, unit and contract tests, and races under a virtual clock. 90 s.
test-quick: install check mysql
	@$(PY) -m pytest -n 2 tests/unit tests/contract tests/simulation \
		&& echo "VERDICT: PASS style, types, unit, contract, simulation" \
		|| { echo "VERDICT: FAIL see above"; exit 1; }

# Before an issue ends: whole matrices and short campaigns. 50 minutes at most.
test-long: install check mysql
	$(PY) -m tests.long --workers $(WORKERS)

# The documentation as a site, in site/.
docs: $(DOCS_STAMP)
	.venv-docs/bin/mkdocs build --strict
	@echo "see site/index.html"

# What may be published, in dist/, and the reasons why not; it uploads nothing. 30 minutes.
release: install $(RELEASE_STAMP)
	$(PY) -m tests.release $(if $(LEAVE_OUT),--leave-out $(LEAVE_OUT),)

# docs/commands.md and the tables of other pages, from the code; a test fails where they are out of date.
reference: install
	$(PY) -m tests.support.generated_docs

# docs/pictures, drawn from the console in Chromium; a test fails where its templates or styles changed since. 30 s.
pictures: install
	$(PY) -m tests.browser.pictures

# Style, types and the direction of imports.
check: install
	.venv/bin/ruff check .
	.venv/bin/mypy
	.venv/bin/lint-imports

# The long campaign; CYCLES=500 is the number of kill -9 cycles.
crash: install
	$(PY) -m tests.crash.campaign --cycles $(or $(CYCLES),500)

# Producers and consumers in all modes on PostgreSQL and DATABASE=mariadb or mysql, under every fault at once; afterwards every
# message is checked. WORKERS=3: the server has three workers, which are also killed and frozen one by one. MESSAGES=100000,
# KILLS=20: continue until so many messages are committed and each process was killed so often; SLOWER=3: longer pauses between
# faults.
LEAST = --messages $(or $(MESSAGES),0) --kills $(or $(KILLS),0) --slower $(or $(SLOWER),1)
crash-history: install
	$(PY) -m tests.history.run --seconds $(or $(SECONDS),600) --workers $(if $(filter command environment,$(origin WORKERS)),$(WORKERS),1) $(LEAST) \
		$(if $(DATABASE),--database $(DATABASE),)

# The same with servers that store transactions in both databases, and a bridge and a relay behind them; with WAL_BRIDGE=1
# a bridge reads PostgreSQL's log, too.
crash-movers: install
	$(PY) -m tests.history.run --over-databases --seconds $(or $(SECONDS),600) $(LEAST) \
		$(if $(DATABASE),--database $(DATABASE),) $(if $(WAL_BRIDGE),--wal-bridge,)

# The same with three nodes of Kafka behind them, one of which is killed every 20 s; 50,000 messages in 600 s.
crash-kafka: install
	$(PY) -m tests.history.run --over-kafka --seconds $(or $(SECONDS),600) $(if $(DATABASE),--database $(DATABASE),)

# Each request of a transaction at Kafka held, cut, repeated and late, at each point of the next transaction: 1,060 cells, a table
# of them, and a verdict. 30 minutes.
matrix-kafka: install
	$(PY) -m pytest tests/integration/test_kafka_late_requests.py -m "" -n 0 -s -q

# The disk of a server that ships its log is lost under load ROUNDS=20 times, while the store is away now and then: it is
# restored, and an audit names and repairs exactly what is missing. 20 minutes.
crash-disk: install
	$(PY) -m tests.crash.disk --rounds $(or $(ROUNDS),20)

# Keys that are held: messages that fail for ever, an operator who retries, releases and skips, and a server that is killed.
crash-held: install
	$(PY) -m tests.crash.held --kills $(or $(KILLS),50) --keys $(or $(KEYS),2000)

# A tenant with MESSAGES=1000000 next to 99 with ten each, whose wait may grow by half at most, while the server is killed:
# once in mode shared by key, once in mode ordered by a header.
crash-fair: install
	$(PY) -m tests.crash.fair --messages $(or $(MESSAGES),1000000) --kills $(or $(KILLS),5)
	$(PY) -m tests.crash.fair --messages $(or $(MESSAGES),1000000) --kills $(or $(KILLS),5) --mode ordered --fair-by header:tenant

# Schedules of every second on three servers over PostgreSQL, or DATABASE=mysql or mariadb, killed KILLS=60 times, half of them
# between a message and its mark: each instant is there once.
crash-schedules: install
	$(PY) -m tests.crash.schedules --database $(or $(DATABASE),postgresql) --kills $(or $(KILLS),60) --schedules $(or $(SCHEDULES),50)

# Producers and sweeps of stored bodies that are killed, for SECONDS=300: no message whose body a sweep has deleted.
crash-store: install
	$(PY) -m tests.crash.bodies --seconds $(or $(SECONDS),300) $(if $(KAFKA),--kafka)

# Delayed messages that are cancelled and replaced at the instant of their release, on a server that is killed just then: none is
# delivered and withdrawn. ROUNDS=60.
crash-withdraw: install
	$(PY) -m tests.crash.withdraw --rounds $(or $(ROUNDS),60) --messages $(or $(MESSAGES),200)

# A shop behind nginx with its default settings, whose server is killed every 10 s, for SECONDS=300: nothing is lost, doubled
# or refused, and no one ends.
crash-proxy: install
	$(PY) -m tests.crash.proxy --seconds $(or $(SECONDS),300)

# Producers in mode auto, whose server is killed every 5 s and stays away for up to 2 s, for SECONDS=600 on each database, or on
# DATABASE=mysql: every commit succeeds within its bound, and nothing is lost, doubled or out of order. OUTAGE=120: the server
# is away once for so long; MOVER=relay or bridge (not on SQLite): it sends what killed producers have left behind.
crash-auto: install
	set -e; for database in $(or $(DATABASE),$(if $(filter bridge,$(MOVER)),,sqlite) postgresql mysql); do \
		$(PY) -m tests.crash.auto --database $$database --seconds $(or $(SECONDS),600) \
			$(if $(OUTAGE),--outage $(OUTAGE),) $(if $(MOVER),--mover $(MOVER),); \
	done

# A bridge killed 200 times while its source rotates, changes its table, restarts and fails over; DATABASE=mariadb or mysql:
# 8 minutes.
crash-bridge: install
	$(PY) -m tests.crash.bridge $(if $(DATABASE),--database $(DATABASE),)

# Three servers over MariaDB, then MySQL, then PostgreSQL, one killed every few seconds: 5 minutes each; DATABASE=mysql: only
# that database.
crash-cluster: install
	set -e; for database in $(or $(DATABASE),mariadb mysql postgresql); do \
		$(PY) -m tests.crash.cluster --database $$database; \
	done

# Faults of every class planted among TRANSACTIONS=1000000, then 49 disasters, each in a copy of the inputs of three
# services: the audit names each, none wrongly, and passes none. DATABASE=mysql, mariadb or, by default, postgresql. At last
# REPAIRS=10 whole runs: an audit, its plan, repairs that are killed at random, no effect twice, an audit that passes. 20 minutes.
audit-faults: install
	$(PY) -m tests.audit.campaign --transactions $(or $(TRANSACTIONS),1000000) --each $(or $(EACH),100) \
		--repairs $(or $(REPAIRS),10) \
		$(if $(DATABASE),--database $(DATABASE),)

# The same audit on a standalone Spark cluster with two workers; STORE=1: from an S3 server, and with no path in common.
# TRANSACTIONS=50000: 2 minutes; 5000000: 20 minutes.
audit-cluster: install
	$(PY) -m tests.audit.cluster $(if $(STORE),--store,) --transactions $(or $(TRANSACTIONS),50000)

# Audits of the demo while it runs and its processes are killed: 5 minutes.
audit-load: install
	$(PY) -m tests.audit.under_load

# A backup under load, restored elsewhere, audited clean: 2 minutes.
audit-backup: install
	$(PY) -m tests.audit.backup

# A watch beside a running shop in which something goes wrong in each window; the watch is killed at each named point of
# its code, the receiver of its alarms fails, the server is killed. 20 minutes.
audit-watch: install
	$(PY) -m tests.audit.watching --windows $(or $(WINDOWS),60)

# Time and memory of an audit of TRANSACTIONS=5000000, RATE=10000 a second, of a fifth and of twice as many; ONE_SIZE=1:
# of that size only. 25 minutes, 12 GB of disk.
bench-audit: install
	$(PY) -m tools.bench audit --transactions $(or $(TRANSACTIONS),5000000) --rate $(or $(RATE),10000) \
		$(if $(ONE_SIZE),--one-size,)

# One audit of 3 logs, 3 databases, 200 groups and 10,000 topics: MESSAGES=1000000, and four times as many. 10 minutes.
bench-audit-fan-in: install
	$(PY) -m tools.bench audit_fan_in --messages $(or $(MESSAGES),1000000)

# The console's pages with 10 million messages in 10,000 topics, none above 300 ms: 4 minutes.
bench-console: install
	$(PY) -m tools.bench console

# What shipping the log costs producers: at least 95 % of their rate. 5 minutes.
bench-shipping: install
	$(PY) -m tools.bench shipping --rounds $(or $(ROUNDS),5) $(if $(TO),--to $(TO))

# What metrics, console and traces cost at the main benchmark: below 5 %. 3 minutes.
bench-observed: install
	$(PY) -m tools.bench observed

# The bridge to Kafka beside a plain transactional producer, by turns on one node: ROUNDS=3, 4 minutes.
bench-kafka: install
	$(PY) -m tools.bench kafka.bridge --rounds $(or $(ROUNDS),3)

# Notify beside RocketMQ, Kafka and an outbox on PostgreSQL, by turns with the same work: ratios, in bench-peers.json and
# bench-peers.svg. ROUNDS=3, SECONDS=6 a run, CALLERS='1 32 128 1024'. 20 minutes, and a minute for Maven's jars.
bench-peers: install
	@command -v mvn >/dev/null && command -v java >/dev/null || bash tests/install-system-packages
	@$(PY) -m tools.bench peers --rounds $(or $(ROUNDS),3) --seconds $(or $(SECONDS),6) \
		--callers $(or $(CALLERS),1 32 128 1024)

# CPU of server and client by function, of the working tree and of BASE=<revision>, while BENCH='transactions --clients 1024
# --seconds 14' runs, or BENCH='delivery --groups 1 --client threads --messages 100000': START=3 seconds after the client's
# start, for SECONDS=6. A minute each.
profile: install
	@$(PY) -m tools.bench profile $(if $(BENCH),--bench='$(BENCH)',) --start=$(or $(START),3) --seconds=$(or $(SECONDS),6) \
		$(if $(BASE),--base $(BASE),)

# What a handler gets, of Consumer and AsyncConsumer, with an inbox, in batches, and over Kafka, beside plain clients and
# RocketMQ's consumer: MESSAGES=100000 of BODY=256 bytes, ROUNDS=3, SECONDS=3 a turn. ONLY='Consumer ordered': kinds by parts
# of their names. 9 minutes.
bench-consumers: install
	@command -v mvn >/dev/null && command -v java >/dev/null || bash tests/install-system-packages
	@$(PY) -m tools.bench consumers --rounds $(or $(ROUNDS),3) --messages $(or $(MESSAGES),100000) --body $(or $(BODY),256) \
		--seconds $(or $(SECONDS),3) $(if $(ONLY),--only $(ONLY),)

# What a message adds to the CPU time of a SQLAlchemy session's transaction, in each mode, from threads and asyncio, on
# SQLite and PostgreSQL: ROUNDS=15, CALLERS=1; 4 minutes.
bench-session: install
	$(PY) -m tools.bench session --rounds $(or $(ROUNDS),15) --callers $(or $(CALLERS),1)

# SECONDS=3600 at 1,000 transactions a second, in every mode: memory, descriptors, threads and data directory stay flat.
soak: install
	$(PY) -m tools.bench soak --seconds $(or $(SECONDS),3600)

# Each attack of strangers and lesser rights at once, for SECONDS=60, beside a producer and a consumer: they keep half
# their rate, memory grows by less than 100 MiB. The attackers have SHARE=0.2 of a core. 2 minutes.
siege: install
	$(PY) -m tools.bench siege --seconds $(or $(SECONDS),60) --share $(or $(SHARE),0.2)

# CASES=20000 requests made from the OpenAPI document, with access off and on: none makes the server fail.
fuzz: install
	$(PY) -m tests.fuzz --cases $(or $(CASES),20000)

# SEEDS=20000 races of check, outcome, delivery and restart under a virtual clock.
simulate: install
	$(PY) -m tests.simulation.run --seeds $(or $(SEEDS),20000)

bench: install
	$(PY) -m tools.bench bars.transactions

# Topics, fan-out, a stopped group, order, delayed messages: about 15 minutes.
bench-queue: install
	$(PY) -m tools.bench bars.queue

# MESSAGES=20000000 of BODY=256 bytes piled up: rates and memory by tenths, producers beside it, start after kill -9,
# draining it cold.
bench-backlog: install
	$(PY) -m tools.bench bars.backlog --messages $(or $(MESSAGES),20000000) --body $(or $(BODY),256)

# SQL storage beside the database's own ceiling, and the bridge: 4 minutes.
bench-sql: install
	$(PY) -m tools.bench sql

# Commits a second, dead rows and the log of PostgreSQL under a long query, with a relay, a bridge, and a bridge without rows:
# SECONDS=600 each, RATE=500 commits a second. Half an hour.
bench-long-query: install
	$(PY) -m tools.bench long_query --seconds $(or $(SECONDS),600) --rate $(or $(RATE),500)

# What is here beside BASE=<revision>, as ratios of BENCH='transactions --clients 128' run PAIRS=9 times each: 6 minutes.
compare: install
	@$(PY) -m tools.bench compare --base='$(BASE)' --bench='$(or $(BENCH),transactions --clients 128)' \
		--pairs=$(or $(PAIRS),9) --run-seconds=$(or $(RUN_SECONDS),900) $(if $(JSON),--json,) \
		$(if $(RATE_AT_LEAST),--rate-at-least=$(RATE_AT_LEAST),) $(if $(CPU_AT_MOST),--cpu-at-most=$(CPU_AT_MOST),)

clean:
	rm -rf .venv .venv-docs .venv-release .compare .peers dist build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	-git worktree prune
