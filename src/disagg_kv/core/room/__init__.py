"""The machines of a room, one for each side, and what they are composed of."""
