"""A site in a secure sum: its identity, the other sites that it knows, and what it has promised so far."""
