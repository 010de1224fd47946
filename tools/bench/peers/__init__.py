"""`make bench-peers`: Notify beside RocketMQ, Kafka and an outbox on PostgreSQL, doing the same work by turns."""
