"""Find this host's addresses and free TCP ports, and check that other hosts can connect to them."""
