"""Campaigns that measure: slow, noisy, not part of the tests."""
