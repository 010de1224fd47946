"""Clocks, threads, signals, databases, logs and traces, for every process of Notify."""
