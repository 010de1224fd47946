"""The commands for manage.py, one in each file."""
