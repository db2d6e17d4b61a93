"""Emulated networks: in virtual time (here), in namespaces with real packets (later)."""
