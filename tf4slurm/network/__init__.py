"""Addresses and ports of this host."""
