"""A log in an object store: segments that a server shipped, listed by a manifest. Prose: docs/adr/0031-shipping.md.

It knows nothing of servers and of the audit: both, and whoever restores a log, read and write stores through this.
"""
