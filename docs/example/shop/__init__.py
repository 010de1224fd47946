"""A shop: orders, and points for them."""
