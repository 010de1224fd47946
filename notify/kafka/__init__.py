"""Apache Kafka: how a message is a record there, and how every part of Notify reaches the brokers."""
