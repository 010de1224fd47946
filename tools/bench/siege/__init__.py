"""`make siege`: attacks of strangers and of clients with few rights, beside a producer and a consumer."""
