"""The server as a member of a cluster: its place in the registry, and the load that it reports there."""
