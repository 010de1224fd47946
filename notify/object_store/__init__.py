"""Object stores by their URLs, through fsspec: for shipped logs, and for large bodies of messages."""
