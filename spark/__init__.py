"""The audit: what the databases committed, against what was delivered and took effect. It runs in no server."""
