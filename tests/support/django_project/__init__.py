"""A Django project for tests: one application with orders. `shop.py` sets Django up, once in a process."""
