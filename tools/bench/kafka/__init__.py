"""Benches of Kafka: Notify beside a plain client of Kafka, by turns on one node."""
