"""The messages of topics as a Python Data Source of Spark, `notify`: from servers, and from what servers shipped."""
