"""The decode side: rooms, the ring, and scatters."""
