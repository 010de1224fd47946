"""What an audit reads: logs, databases, Kafka."""
