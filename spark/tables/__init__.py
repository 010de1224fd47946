"""Tables of Parquet files that a manifest lists, in a directory or an object store, for anything that reads Parquet."""
