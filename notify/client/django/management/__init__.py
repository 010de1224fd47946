"""The commands for manage.py."""
