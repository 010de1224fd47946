"""The audit compares committed transactions with deliveries and their effects. It runs on Spark, outside of servers."""
