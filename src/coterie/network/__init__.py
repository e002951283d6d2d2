"""What crosses a network: messages as bytes, and the guard at the door."""
