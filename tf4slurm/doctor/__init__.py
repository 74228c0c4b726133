"""Check host, cluster and software for problems that jobs would have, and give advice for each problem."""
