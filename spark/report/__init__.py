"""The report of an audit: one page for people, JSON and Parquet for programs. The page loads nothing."""
