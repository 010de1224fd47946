"""`make compare`: the working tree beside a commit."""
