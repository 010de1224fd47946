"""What an audit leaves behind: one page for people, JSON and Parquet for programs. The page loads nothing."""
