"""The pictures of README and docs, each made by a function. After a change: ``python -m pictures``."""
