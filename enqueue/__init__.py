"""The client side: enqueue tasks, follow them, steer them."""
