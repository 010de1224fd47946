"""What any process of Notify needs: clocks, threads, signals, databases, logs, traces."""
