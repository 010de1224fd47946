"""The console: pages in a browser over the admin routes. It can do nothing that they cannot."""

from notify.server.console.pages import failed, router, static_files

__all__ = ["failed", "router", "static_files"]
