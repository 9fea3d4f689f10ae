"""What moves the bytes: one mover for each kind of path, what they share, and checksums around them."""
