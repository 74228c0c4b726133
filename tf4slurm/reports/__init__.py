"""Make the report and the live page of a job: timeline, charts and recommendations."""
