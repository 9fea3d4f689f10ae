"""The other endpoints: who is known, silent or lost. Sans IO."""
