"""The SDK's own threads: event loops, pools for handlers, and the guard that keeps forks away from them."""
