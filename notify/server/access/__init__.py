"""Access: principals by token, certificate or identity provider, and their rights per topic and group."""
