"""The agent of one task: its child process, its registration, its checks."""
