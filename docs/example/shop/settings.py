"""Addresses, from the environment."""

import os

DATABASE = os.environ.get("SHOP_DATABASE", "postgresql+psycopg://localhost/shop")
NOTIFY = os.environ.get("SHOP_NOTIFY", "http://127.0.0.1:7400")
