"""One process: its database, sockets, servers, worker and signals, and the order in which they start and stop."""
