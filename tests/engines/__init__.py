"""Tests in real engines: ``nox -s engines``."""
