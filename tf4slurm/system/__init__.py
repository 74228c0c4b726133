"""Processes, threads, streams and files of this host."""
