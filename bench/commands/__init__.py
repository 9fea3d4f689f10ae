"""The commands of ``python -m bench``, one a file."""
