"""Delayed messages in Kafka: they wait on disk, in topics that are wheels of a clock, until they are due."""
