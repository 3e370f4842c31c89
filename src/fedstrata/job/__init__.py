"""The job file: its tables, checked without torch."""
