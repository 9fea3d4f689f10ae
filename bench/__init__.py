"""Measurements that a user can repeat: strategies side by side in one run, and the ceiling they are held against."""

from .shape import TransferShape
from .transfer import Measured, TransferReport, run_transfer

__all__ = ["Measured", "TransferReport", "TransferShape", "run_transfer"]
