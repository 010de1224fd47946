"""The console: web pages that show and change the server through its admin routes only."""

from notify.server.console.rendering import failed, static_files
from notify.server.console.router import router

__all__ = ["failed", "router", "static_files"]
