"""The consumer groups of a Kafka cluster, which a server shows to administrators and changes for them."""
