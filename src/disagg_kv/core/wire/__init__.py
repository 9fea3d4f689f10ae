"""Frames and their codec, and geometry, page lists and checksum choices as they stand in frames."""
