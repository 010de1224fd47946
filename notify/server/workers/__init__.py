"""Workers behind one port: what prepares, starts and watches them, and hands them their connections."""
