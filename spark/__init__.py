"""The audit compares what databases committed with what was delivered and took effect. It runs outside of servers."""
