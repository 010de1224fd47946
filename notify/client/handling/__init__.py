"""What both consumers do with messages: from the reply, through handlers, to what became of them."""
