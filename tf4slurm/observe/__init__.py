"""What is kept of a job's life."""
