"""Network of this host: addresses of interfaces, TCP ports, reachability checks, and isolation."""
