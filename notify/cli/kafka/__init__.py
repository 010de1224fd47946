"""`notify doctor --kafka`: looks whether a Kafka cluster keeps what Notify promises with it."""
