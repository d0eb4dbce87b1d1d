"""Every call once, for both clients: its arguments and documentation, its request, what its reply becomes.

A builder takes a method's arguments and returns a Call; the clients turn builders into methods (client.py waits for
the reply, aio.py awaits it).
"""
