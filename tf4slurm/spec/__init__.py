"""Every option of a job, declared once, and settings files."""
