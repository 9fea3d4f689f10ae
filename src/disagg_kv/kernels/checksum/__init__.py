"""Sums that agree however a cache is cut."""
