"""Jobs: long work that an administrator started, which runs in the background, and its records."""
