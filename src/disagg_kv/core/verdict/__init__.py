"""How the ranks of one instance agree on the outcome of a room."""
