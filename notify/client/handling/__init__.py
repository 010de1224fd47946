"""Messages in hand of both consumers: from the reply, through handlers, to the result of each."""
