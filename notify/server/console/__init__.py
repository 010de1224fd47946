"""The console: pages in a browser over the admin routes, with no other access to the server."""

from notify.server.console.rendering import failed, static_files
from notify.server.console.router import router

__all__ = ["failed", "router", "static_files"]
