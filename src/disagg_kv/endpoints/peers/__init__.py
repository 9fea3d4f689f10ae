"""What an endpoint knows about other endpoints, and how it reaches them."""
