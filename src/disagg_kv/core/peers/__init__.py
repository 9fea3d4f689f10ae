"""The other endpoints: who is known, silent, lost or parted. Sans IO."""
