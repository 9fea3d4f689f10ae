"""Numbers of one floating-point format into another, with scales; :mod:`disagg_kv.geometry.formats` has the rules."""
