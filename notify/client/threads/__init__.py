"""The SDK's own threads: event loops, handlers' pools, and forks beside them."""
