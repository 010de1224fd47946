"""Settings and credentials that change while servers run: their records, shared by all of a registry, and how each server follows them."""
