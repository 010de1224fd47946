"""Messages and their schemas, ids, limits and filters, as they cross a wire."""
