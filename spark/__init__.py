"""The audit: what the databases committed, against what was delivered and took effect. Nothing here runs in a server."""
