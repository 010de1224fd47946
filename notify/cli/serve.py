"""`notify serve`."""

from __future__ import annotations

from pathlib import Path

import typer

from notify import settings as settings_module


def register(app: typer.Typer) -> None:
    @app.command()
    def serve(
        host: str | None = typer.Option(None, help="Address to listen on (loopback). [env: NOTIFY_HOST]"),
        port: int | None = typer.Option(None, help="Port; 0 takes a free one. [env: NOTIFY_PORT]"),
        data_dir: str | None = typer.Option(None, help="Directory of the log. [env: NOTIFY_DATA_DIR]"),
        shard: str | None = typer.Option(None, help="Name of this log among several. [env: NOTIFY_SHARD]"),
        config: Path | None = typer.Option(
            None, help="TOML file of settings. [env: NOTIFY_CONFIG]", envvar="NOTIFY_CONFIG"
        ),
    ) -> None:
        """Run a server: transactions and queues in one log on the local disk."""
        from notify.server.serve import serve as run

        flags = {"host": host, "port": port, "data_dir": data_dir, "shard": shard}
        raise typer.Exit(run(settings_module.load(flags, config)))
