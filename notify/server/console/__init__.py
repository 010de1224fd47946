"""The console: web pages that show and change the server through its admin routes only."""

from notify.server.console.open_pages import open_page
from notify.server.console.rendering import failed
from notify.server.console.router import router

__all__ = ["failed", "open_page", "router"]
