"""Commands about a Kafka cluster: `notify doctor --kafka`, and `notify refused` for a URL of Kafka."""
