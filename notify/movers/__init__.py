"""The relay, the sinks, and code that a relay and a bridge share."""
