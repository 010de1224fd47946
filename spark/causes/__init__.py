"""The causes of an audit's findings: what to do first, each with its number, its time and commands to copy."""
