"""Helpers of tests in several folders. A test module imports from here and from its own folder, never from a test."""
