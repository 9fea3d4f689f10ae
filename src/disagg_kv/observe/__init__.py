"""What endpoints do, for systems that watch them; see docs/observe.md.

Each module needs a package of its own: ``disagg_kv.observe.prometheus`` needs the extra ``prometheus``.
"""
