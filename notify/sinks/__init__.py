"""Where bridges and relays put messages: a queue server, or Apache Kafka."""
