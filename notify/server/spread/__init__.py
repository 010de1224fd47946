"""One console for several workers: an admin request that names no worker gets one answer from all of them."""
