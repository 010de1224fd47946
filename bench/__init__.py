"""Measuring campaigns: slow, noisy, and no part of the tests."""
