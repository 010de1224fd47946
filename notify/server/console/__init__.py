"""The console: pages in a browser over the admin routes. It can do nothing that they cannot."""

from notify.server.console.rendering import failed, static_files
from notify.server.console.router import router

__all__ = ["failed", "router", "static_files"]
