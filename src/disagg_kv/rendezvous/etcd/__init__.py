"""Addresses in etcd: leases for the ranks that live, one watch for those that look them up."""

from .rendezvous import EtcdRendezvous

__all__ = ["EtcdRendezvous"]
