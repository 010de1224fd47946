"""Producers: from `send` to the stored half and its outcome."""
