"""The console: web pages that show and change the server through its admin routes only."""
