"""A real model's cache from tensor-parallel prefill processes to decode processes, checked byte for byte.

``run`` is the parent. It starts ``launch``, which imports torch and transformers once and forks every rank:
``prefill`` and ``decode`` are the two roles, ``reference`` is one process with the whole model. They leave their
tokens, caches and pages as files, which ``check`` compares with nothing but NumPy.
"""

from .config import DemoConfig, Message, steps
from .report import Report, TurnReport
from .run import run_demo

__all__ = ["DemoConfig", "Message", "Report", "TurnReport", "run_demo", "steps"]
