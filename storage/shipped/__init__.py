"""A log in an object store: segments that a server shipped, listed by a manifest. Prose: docs/adr/0031-shipping.md.

It does not know servers or the audit: both of them, and a restore, read and write stores through this package.
"""
