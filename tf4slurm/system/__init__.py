"""Use the processes, threads, streams and files of this host."""
