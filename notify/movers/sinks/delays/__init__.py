"""Delayed messages in Kafka: they wait on disk, in topics that form a timing wheel, until they are due."""
