"""What moves messages from a source into a queue: the relay, the sinks, and what a relay and a bridge share."""
