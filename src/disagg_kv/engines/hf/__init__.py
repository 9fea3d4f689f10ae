"""Hugging Face transformers: a model's cache in the pages of a pool, without a change to any model's code."""

from ...prefix import PageAllocator
from .cache import PagedHFCache
from .spec import shard_from_config, spec_from_config

__all__ = ["PageAllocator", "PagedHFCache", "shard_from_config", "spec_from_config"]
