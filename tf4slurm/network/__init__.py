"""Network of this host: addresses of interfaces, TCP ports, and reachability checks."""
