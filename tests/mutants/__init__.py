"""Planted bugs that the simulator must find: each is a line of the library, changed while it runs."""
