"""Workers that join a running job."""
