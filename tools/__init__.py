"""The maintainers' tools. They are not part of the package that users install."""
