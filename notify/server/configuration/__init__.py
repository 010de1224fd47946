"""Settings and credentials that change while servers run: their records, and how each server follows them."""
