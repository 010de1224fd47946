"""The inputs of an audit: logs, databases, Kafka."""
