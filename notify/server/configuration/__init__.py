"""Settings and credentials that may change while servers run: their records, and how each server follows them."""
