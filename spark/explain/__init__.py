"""One transaction explained: its history from every source, its repairs, and a verdict. It needs no Spark."""
