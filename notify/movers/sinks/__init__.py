"""Sinks: the targets to which bridges and relays move messages, a queue server or Apache Kafka."""
