"""One console of several workers: an admin request that names no worker is answered for all of them."""
