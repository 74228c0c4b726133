"""The agent of one task, and its child process."""
