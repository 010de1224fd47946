"""What crosses a wire: messages and their schemas, ids, limits, filters."""
