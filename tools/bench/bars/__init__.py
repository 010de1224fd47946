"""The bars: figures that must be reached on one machine, each with its verdict (`make bench`, and others)."""
