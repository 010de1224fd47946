"""What is wrong with a message, with the evidence, and what can be judged at all."""
