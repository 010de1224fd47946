"""Apache Kafka: the form of a message as a record, and the access of every part of Notify to the brokers."""
