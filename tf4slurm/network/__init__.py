"""Find this host's addresses and free TCP ports, and check that other hosts reach them."""
