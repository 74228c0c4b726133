"""Import what a script imports once per host, and fork the processes that run the script."""
