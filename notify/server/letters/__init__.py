"""Dead letters of groups, over any queue engine: what administrators see of them, and how they are closed."""
