"""Prefill and decode between live vLLM instances on GPUs: this connector beside NIXL's, in both orders of a router.

``python -m benchmarks.engines_gpu run`` measures one topology and block size; see ``__main__``.
"""
