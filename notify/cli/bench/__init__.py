"""`notify bench transactions`: producers and consumers in processes, through the public SDK against a real server."""
