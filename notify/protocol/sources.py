"""The source of a half: the id of the database that has its transaction, or a word that says that none has it."""

NO_DATABASE = "none"
"""The source of halves whose transactions are in no database: no local row tells their outcome, only a listener."""
