"""Real machines: the server, devices, messages, the handshake, and transports."""
