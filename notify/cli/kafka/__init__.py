"""`notify doctor --kafka`: checks whether a Kafka cluster is configured to keep Notify's guarantees."""
