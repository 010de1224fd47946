"""CPU time a transaction, by function, of the working tree and of a commit."""
