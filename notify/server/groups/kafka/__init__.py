"""The consumer groups of a Kafka cluster, for a server that shows and steers them."""
