"""Large and compressed bodies: stored before a message is sent, and read before its handler is called."""
