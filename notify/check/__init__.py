"""Check-back."""
