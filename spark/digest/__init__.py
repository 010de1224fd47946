"""The digest of an audit: counts and hashes of about a minute's messages each, by which equal parts need no reading."""
