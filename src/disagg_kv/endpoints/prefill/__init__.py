"""The prefill side: rooms, routes, and the transfers that serve them."""
