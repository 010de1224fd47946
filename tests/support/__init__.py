"""What tests of several folders share. A test module imports from here and from its own folder, never from a test."""
